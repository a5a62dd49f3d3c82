"""The use cases about measured runs: how far predictions are from them, and a profile of somebody's own machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import yaml

from planner.accuracy.comparison import plot
from planner.accuracy.comparison.report import Scored, report, scored
from planner.accuracy.fits import calibration
from planner.accuracy.predict import Prediction
from planner.accuracy.runs.records import PUBLIC, Records, names, public_records, read_records
from planner.errors import InputError
from planner.service.inputs import one_of
from planner.service.outputs import check_target, write_file
from planner.service.profiles import load_profile
from planner.service.requests import Progress
from planner.specs.accuracy import AccuracyDocument, Grouping
from planner.specs.problems import shown
from planner.specs.profile import Calibration, Profile

PLOT_FORMATS = ("svg", "png")


@dataclass(frozen=True, kw_only=True)
class AccuracyRequest:
    """What to compare and where to write it."""

    records: tuple[Path, ...] = ()
    """Record files; none means the public records."""
    by: str = "class"
    profile: Path | None = None
    predictions: Path | None = None
    """Write one JSON line a record here."""
    plot: Path | None = None
    """Write a scatter plot here (.svg or .png)."""
    force: bool = False


def accuracy(request: AccuracyRequest, progress: Progress | None = None) -> AccuracyDocument:
    """Predict every record from its configuration alone and compare; files are written as the request says."""
    by: Grouping = next(word for word in get_args(Grouping) if word == one_of(request.by, "--by", get_args(Grouping)))
    kind = _checked_outputs(request)
    profile = None if request.profile is None else load_profile(request.profile)
    tell = progress or _silent
    tell(f"reading {names(request.records)}")
    records = _records(request.records)
    tell(f"predicting {len(records.runs):,} runs")
    rows = scored(records.runs, profile)
    document = report(rows, records, name=names(request.records), by=by, profile=profile)
    if request.predictions is not None:
        write_file(request.predictions, _lines(rows), "--predictions")
    if request.plot is not None and kind is not None:
        tell("plotting")
        write_file(request.plot, plot.scatter(rows, list(plot.PANELS), kind), "--plot")
    return document


def _silent(_: str) -> None:
    """Nobody watches."""


def _records(paths: Sequence[Path]) -> Records:
    return read_records(paths) if paths else public_records()


def _checked_outputs(request: AccuracyRequest) -> plot.Format | None:
    """Refuse outputs that cannot be written before anything is predicted; the format of the plot."""
    inputs = [(path, "--records") for path in request.records]
    inputs += [(request.profile, "--profile")] if request.profile is not None else []
    if request.predictions is not None:
        check_target(request.predictions, "--predictions", force=request.force, others=inputs)
        inputs.append((request.predictions, "--predictions"))
    if request.plot is None:
        return None
    suffix = request.plot.suffix.lower().removeprefix(".")
    if suffix not in PLOT_FORMATS:
        raise InputError(
            "the plot has no known format",
            where="--plot",
            got=shown(str(request.plot)),
            allowed="a name that ends in .svg or .png",
            hint="for example --plot accuracy.svg",
        )
    check_target(request.plot, "--plot", force=request.force, others=inputs)
    plot.check_available()
    return "svg" if suffix == "svg" else "png"


def _lines(rows: Sequence[Scored]) -> bytes:
    """One line a record, in the order of the records."""
    return "".join(json.dumps(_line(row.prediction), allow_nan=False) + "\n" for row in rows).encode()


def _line(prediction: Prediction) -> dict[str, object]:
    return {
        "id": prediction.id,
        "step_time_s": prediction.step_time_s,
        "step_time_range_s": prediction.step_time_range_s,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "peak_memory_range_bytes": prediction.peak_memory_range_bytes,
        "fits": prediction.fits,
        "skipped": prediction.skipped,
    }


def calibrate(
    records: Sequence[Path], *, out: Path | None = None, force: bool = False, progress: Progress | None = None
) -> Calibration:
    """Fit a machine profile to the runs of the files and write it as YAML where ``out`` says."""
    if not records:
        raise InputError(
            f"no record file is given; the {PUBLIC} are what the constants come from",
            where=calibration.WHERE,
            hint=calibration.NEEDS,
        )
    if out is not None:
        check_target(out, "--out", force=force, others=[(path, calibration.WHERE) for path in records])
    tell = progress or _silent
    tell(f"fitting the runs of {names(records)}")
    result = calibration.calibrate(read_records(records, calibration.WHERE))
    if out is not None:
        write_profile(result.profile, out)
    return result


def write_profile(profile: Profile, out: Path) -> None:
    """The profile as YAML."""
    text = yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    write_file(out, text.encode(), "--out")
