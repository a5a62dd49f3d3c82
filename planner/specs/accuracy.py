"""The result of comparing predictions with measured runs: error by group, fit and out of memory, ranking, and whatever
could not be read or priced."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import Field

from planner.specs.base import Spec

ACCURACY_SCHEMA_VERSION = 1
_ANY_AND_ONE = 2

Grouping = Literal["class", "source", "gpu", "framework"]


class RecordProblem(Spec):
    """A line of a record file that cannot be used, and why."""

    file: str
    line: int | None = None
    """From 1; null where the problem is the file's."""
    what: str
    got: str | None = None
    allowed: str | None = None
    hint: str | None = None


class NotPriced(Spec):
    """A record that was read and cannot be predicted."""

    id: str
    reason: str
    file: str = ""
    line: int | None = None


class Errors(Spec):
    """Relative errors (predicted / measured - 1) of a set of runs."""

    rows: int
    median: float
    """Of the absolute error."""
    p90: float
    """90th percentile of the absolute error: the value that nine rows of ten stay within."""
    bias: float
    """Mean signed error; negative means predicted too fast, or too little memory."""


class Validation(Spec):
    """What the errors of a class would be if the constants had been fitted without the run in question."""

    without_group: Errors
    """Without the runs of its source on its model and accelerator."""
    without_source: Errors
    """Without all runs of its source."""


class EffectRow(Spec):
    """The error of the model without one of its effects."""

    effect: str
    error: float
    """Mean |log(predicted / measured)|, every class counting the same."""
    recentred: float
    """The same after every class has found its own overall rate."""
    most_affected: str
    """The class whose error grows most."""


class TimeRow(Spec):
    """Step-time error of one group."""

    group: str
    errors: Errors | None
    """Null where nothing of the group could be priced."""
    skipped: int
    """Timed rows that could not be priced."""
    assumed: float
    """Share of the priced rows with at least one setting that the source does not state."""
    in_range: float | None = None
    """Share of the priced rows whose measured time lies in the 80 % range of the prediction."""
    validation: Validation | None = None
    """Null for other records than the public ones."""


class MemoryRow(Spec):
    """Peak-memory error of one group and kind of figure."""

    group: str
    kind: Literal["any", "allocated", "reserved", "device"]
    """The framework allocator's peak, its reserve, or what the driver shows (nvidia-smi); any: all of them."""
    errors: Errors


class FitRow(Spec):
    """Whether runs were said to fit, against whether they ran."""

    group: str
    ran_said_fits: int = 0
    ran_said_not: int = 0
    oom_said_fits: int = 0
    oom_said_not: int = 0

    @property
    def false_fits(self) -> float | None:
        """Share of the runs out of memory that were said to fit."""
        total = self.oom_said_fits + self.oom_said_not
        return self.oom_said_fits / total if total else None

    @property
    def false_misfits(self) -> float | None:
        """Share of the runs that ran and were said not to fit."""
        total = self.ran_said_fits + self.ran_said_not
        return self.ran_said_not / total if total else None


class SweepRow(Spec):
    """Ranking of the measured settings of one model on one cluster."""

    source: str
    model: str
    gpus: int
    seq_len: int | None
    global_batch: int
    rows: int
    grid: bool
    """The source ran a grid of layouts on one software; only such sweeps count in the summary."""
    regret: float
    """Measured time of the row predicted fastest over the fastest measured time, minus 1."""
    top3_regret: float
    """The same of the best of the three rows predicted fastest."""
    spearman: float
    """Rank correlation of predicted and measured step time."""


class RankingSummary(Spec):
    """Ranking over all grids."""

    sweeps: int
    regret_mean: float
    regret_median: float
    regret_max: float
    top3_regret_mean: float
    spearman_median: float


class AccuracyDocument(Spec):
    """Predicted against measured, as table, JSON and docs/accuracy.md show it."""

    schema_version: int = ACCURACY_SCHEMA_VERSION
    planner_version: str
    records: str
    """The public records, or the files that were given."""
    by: Grouping
    read: int
    """Records that could be read."""
    priced: int
    profile: str | None = None
    """Framework and accelerator of the profile that was given; null: the published constants."""
    profiled: int = 0
    """Records that were predicted with it: those on its accelerator."""
    step_time: tuple[TimeRow, ...]
    memory: tuple[MemoryRow, ...]
    fit: tuple[FitRow, ...]
    ranking: RankingSummary | None
    sweeps: tuple[SweepRow, ...]
    excluded: dict[str, int] = Field(default_factory=dict)
    """Timed rows that are not compared: they measure something else than a steady training step, or do not state it."""
    skipped: dict[str, int] = Field(default_factory=dict)
    """Reasons why records could not be priced."""
    not_priced: tuple[NotPriced, ...] = ()
    problems: tuple[RecordProblem, ...] = ()

    @property
    def memory_by_kind(self) -> tuple[MemoryRow, ...]:
        """The memory rows without those of all figures where a group has only one kind of figure."""
        kinds = Counter(row.group for row in self.memory)
        return tuple(row for row in self.memory if row.kind != "any" or kinds[row.group] > _ANY_AND_ONE)

    def to_json_dict(self) -> dict[str, Any]:
        """The document as plain JSON types."""
        return self.model_dump(mode="json")
