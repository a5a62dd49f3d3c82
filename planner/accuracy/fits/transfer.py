"""What one run of a framework that the planner does not know is worth: the error on its other runs before and after
calibrating on it.

Public runs play the unknown framework: they are renamed, so that the default stack prices them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from planner.accuracy.comparison.report import errors_of, scored
from planner.accuracy.fits.calibration import calibrate
from planner.accuracy.runs.records import Records
from planner.errors import InputError
from planner.specs.measurement import MeasuredRun

UNKNOWN = "in-house trainer"
_CALIBRATING_RUNS = 8
"""Runs of each set that are calibrated on, one at a time."""

SETS = {
    "Paxml, H100": ("dgxc", "h100-80gb-sxm", "paxml"),
    "llm-foundry, A100 40 GB": ("llm-foundry", "a100-40gb-sxm", "llm-foundry"),
    "llm-foundry, H100": ("llm-foundry", "h100-80gb-sxm", "llm-foundry"),
    "Megatron-LM scaling, H100": ("mlm-readme-h100-strong", "h100-80gb-sxm", "megatron"),
    "BLOOM candidates, A100": ("bloom-prequel", "a100-80gb-sxm", "megatron"),
    "torchtitan, H100 96 GB": ("torchtitan", "h100-96gb-hbm2e-500w", "torchtitan"),
    "MaxText, H100": ("dgxc", "h100-80gb-sxm", "maxtext"),
    "AutoModel, H100": ("automodel", "h100-80gb-sxm", "fsdp2"),
}
"""Source, GPU as the records name it, and start of the framework's name."""


@dataclass(frozen=True)
class Transfer:
    """Median absolute error of the runs that were not calibrated on."""

    runs: int
    before: float
    after: float


def transfer(name: str, runs: Sequence[MeasuredRun]) -> Transfer:
    """The set ``name`` of the public ``runs``, median over several choices of the calibrating run."""
    source, gpu, framework = SETS[name]
    renamed = [
        run.model_copy(update={"run": run.run.model_copy(update={"framework": UNKNOWN})})
        for run in runs
        if (run.source_name, run.hardware.gpu) == (source, gpu) and (run.run.framework or "").startswith(framework)
    ]
    rows = [row for row in scored(renamed) if row.time_error is not None]
    before, after = [], []
    for index in range(0, len(rows), max(1, len(rows) // _CALIBRATING_RUNS)):
        others = [*rows[:index], *rows[index + 1 :]]
        try:
            profile = calibrate(Records([rows[index].run])).profile
        except InputError:
            continue  # an implausible run is refused, as a user's would be
        before.append(errors_of([row.time_error or 0.0 for row in others]).median)
        again = scored([row.run for row in others], profile)
        after.append(errors_of([row.time_error or 0.0 for row in again]).median)
    return Transfer(len(rows), statistics.median(before), statistics.median(after))
