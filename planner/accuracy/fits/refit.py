"""Fits the published constants to the public runs again and writes what follows from it: values, ranges, validation.

Run by hand with ``make fit`` after the cost model or the records changed; everything it writes is committed."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from planner.accuracy.comparison.classes import class_of_run, excluded_from_time
from planner.accuracy.comparison.report import ALL, errors_of
from planner.accuracy.fits import validated
from planner.accuracy.fits.ablation import ablate
from planner.accuracy.fits.experience import Errors, boundary_ranges, ranges, widening
from planner.accuracy.fits.fitting import fit
from planner.accuracy.fits.validation import CrossValidation, cross_validate, group_of
from planner.accuracy.predict import cases_of, predict
from planner.accuracy.runs.interpret import Case
from planner.accuracy.runs.records import public_runs
from planner.cost import constants as cost_constants
from planner.cost.constants import Key, fitted_constants, published_constants
from planner.cost.uncertainty import class_name, memory_class_name
from planner.specs.accuracy import Validation
from planner.specs.batch import FloatArray
from planner.units import GIB

_ASSUMED_WEIGHT = 0.3
"""Weight of runs whose recomputation or micro-batch had to be filled in."""
AS_OF = "2026-11"
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


def memory_ranges(accelerator_widening: float) -> dict[str, Any]:
    """Ranges of peak memory: from figures where sources print them, else from what did not fit."""
    runs = public_runs()
    cases, _ = cases_of([run for run in runs if run.measured.peak_mem_gib is not None])
    predicted = [prediction.peak_memory_bytes or np.nan for prediction in predict(cases)]
    measured = [(case.run.measured.peak_mem_gib or np.nan) * GIB for case in cases]
    errors = np.log(np.array(predicted) / np.array(measured))
    found = ranges(Errors(cases, [_memory_class(case) for case in cases], errors, errors), accelerator_widening)
    ended, _ = cases_of([run for run in runs if run.measured.oom is True])
    boundaries = boundary_ranges(ended, [_memory_class(case) for case in ended], predict(ended))
    found["classes"] = dict(sorted((boundaries | found["classes"]).items()))
    return found


def _memory_class(case: Case) -> str:
    return memory_class_name(case.context.backend.family, case.context.model)


def _time_class(case: Case) -> str:
    return class_name(case.context.backend.family, case.context.job, case.context.model)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def main() -> None:
    """Fit, write the constants, cross-validate, write ranges and validation."""
    cases = timed_cases()
    weights, free = row_weights(cases), fitted_constants()
    _say(f"{len(free)} constants, {len(cases)} runs")
    found = fit(
        cases, published_constants(), free, weights, progress=lambda i, loss: _say(f"iteration {i}: {loss:.1f}")
    )
    write_constants(found.values)
    table = published_constants().with_values(found.values)
    validation = cross_validate(cases, table, free, weights, found, progress=lambda name: _say(f"without {name}"))
    names = [_time_class(case) for case in cases]
    wider = widening(validation.without_group, validation.without_accelerator, cases)
    time = ranges(Errors(cases, names, validation.without_group, validation.without_framework), wider)
    document = {"as_of": AS_OF, "step_time": time, "memory": memory_ranges(wider)}
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=110)
    UNCERTAINTY.write_text(text, encoding="utf-8")
    classes = [class_of_run(case.run) for case in cases]
    validated.write(_by_class(classes, validation), ablate(cases, classes, table))


def _by_class(classes: Sequence[str], validation: CrossValidation) -> dict[str, Validation]:
    """Out-of-fold figures of every class, and of all runs together."""
    found = {}
    for name in (*sorted(set(classes)), ALL):
        rows = np.array([name in (other, ALL) for other in classes], dtype=bool)
        found[name] = Validation(
            without_group=errors_of(np.expm1(validation.without_group[rows]).tolist()),
            without_source=errors_of(np.expm1(validation.without_source[rows]).tolist()),
        )
    return found


if __name__ == "__main__":
    main()
