"""Fits the published constants to the public runs again and writes what follows from it: values, ranges, validation.

Run by hand with ``make fit`` after the cost model or the records changed; everything it writes is committed."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from planner.accuracy.ablation import ablate
from planner.accuracy.classes import class_of_run, excluded_from_time
from planner.accuracy.experience import Errors, ranges
from planner.accuracy.fitting import fit
from planner.accuracy.interpret import Case
from planner.accuracy.predict import cases_of, predict
from planner.accuracy.records import public_runs
from planner.accuracy.validation import cross_validate, group_of
from planner.cost import constants as cost_constants
from planner.cost.constants import Key, fitted_constants, published_constants
from planner.specs.batch import FloatArray
from planner.units import GIB

_ASSUMED_WEIGHT = 0.3
"""Weight of runs whose recomputation or micro-batch had to be filled in."""
DATA = Path(__file__).with_name("data")
CONSTANTS = Path(cost_constants.__file__).with_name("constants.yaml")
UNCERTAINTY = Path(cost_constants.__file__).with_name("uncertainty.yaml")


def timed_cases() -> list[Case]:
    """Public runs whose step time counts."""
    runs = [run for run in public_runs() if run.measured.step_time_s is not None and not excluded_from_time(run)]
    return [case for case in cases_of(runs)[0] if case.timed]


def row_weights(cases: Sequence[Case]) -> FloatArray:
    """A group of n runs counts as sqrt(n) runs, so that one large sweep does not decide."""
    sizes = Counter(group_of(case) for case in cases)
    return np.array([sizes[group_of(case)] ** -0.5 * (_ASSUMED_WEIGHT if case.assumed else 1.0) for case in cases])


def write_constants(values: dict[Key, float], path: Path = CONSTANTS) -> None:
    """Put fitted values into the file, leaving everything else as it stands."""
    lines, name = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        heading = re.fullmatch(r"  ([a-z0-9_]+):", line)
        name = heading[1] if heading else name
        entry = re.fullmatch(r"(      ([a-z0-9.-]+): \{value: )[^,]+(,.*)", line)
        if entry and (name, entry[2]) in values:
            line = f"{entry[1]}{values[(name, entry[2])]:.4g}{entry[3]}"
        lines.append(line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def memory_errors() -> Errors:
    """Errors of peak memory where a record states one and all its settings."""
    cases, _ = cases_of([run for run in public_runs() if run.measured.peak_mem_gib is not None])
    predicted = [prediction.peak_memory_bytes or np.nan for prediction in predict(cases)]
    measured = [(case.run.measured.peak_mem_gib or np.nan) * GIB for case in cases]
    errors = np.log(np.array(predicted) / np.array(measured))
    return Errors(cases, errors, errors)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def main() -> None:
    """Fit, write the constants, cross-validate, write ranges and validation."""
    cases = timed_cases()
    weights, free = row_weights(cases), fitted_constants()
    _say(f"{len(free)} constants, {len(cases)} runs")
    found = fit(
        cases,
        published_constants(),
        free,
        weights,
        progress=lambda i, loss: _say(f"iteration {i}: {loss:.1f}"),
    )
    write_constants(found.values)
    published_constants.cache_clear()
    cost_constants._document.cache_clear()
    table = published_constants()
    validation = cross_validate(cases, table, free, weights, found, progress=lambda name: _say(f"without {name}"))
    time = ranges(Errors(cases, validation.without_group, validation.without_source))
    document = {"as_of": "2026-11", "step_time": time, "memory": ranges(memory_errors())}
    UNCERTAINTY.write_text(
        yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=110), encoding="utf-8"
    )
    classes = [class_of_run(case.run) for case in cases]
    whole, without = ablate(cases, classes, table)
    rows = [
        {
            "id": case.run.id,
            "class": name,
            "fitted": round(float(fitted), 5),
            "without_group": round(float(group), 5),
            "without_source": round(float(source), 5),
        }
        for case, name, fitted, group, source in zip(
            cases, classes, found.errors, validation.without_group, validation.without_source, strict=True
        )
    ]
    effects = [vars(worth) for worth in (whole, *without)]
    text = json.dumps({"constants": len(free), "rows": rows, "effects": effects}, indent=0)
    (DATA / "validation.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
