"""The answer about an existing configuration: what is wrong with it, whether it fits, how fast it is, what would help.

``planner check`` and ``planner diagnose`` print it; the API returns the same document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from planner.specs.base import Spec
from planner.specs.plan import Assumption, Plan, Request

CHECK_SCHEMA_VERSION = 1


class CheckFinding(Spec):
    """One thing that the author of the configuration should know."""

    id: str
    """Of the framework's rule where one is broken (`planner backends --rules`)."""
    severity: Literal["error", "warning", "note"]
    """error: the framework refuses it, or it does not do what it says; warning: it runs, but wrong or slow."""
    message: str
    """What is wrong, in a sentence."""
    where: str = ""
    """File, line and key, or the flag."""
    got: str = ""
    """The rule's equation with the configuration's values."""
    allowed: str = ""
    """What would be accepted."""
    hint: str = ""
    """What to write instead."""


class Improvement(Spec):
    """One change to the configuration, everything else kept."""

    change: tuple[str, ...]
    """``micro_batch 2 instead of 1``; the first is the one that was asked, the others follow from it."""
    settings: tuple[str, ...] = ()
    """The same in the words of the framework's files: what to write and what to leave out."""
    plan: Plan
    """The configuration with the change, and its estimate."""
    step_time_change: float | None
    """New over old step time, less 1; null where the configuration could not be priced."""


LEAVE_OUT = "leave out "
"""How a setting begins that is to be removed."""


def instruction(settings: Sequence[str]) -> str:
    """``write a, b; leave out c`` for settings of an improvement."""
    removed = [setting.removeprefix(LEAVE_OUT) for setting in settings if setting.startswith(LEAVE_OUT)]
    written = [setting for setting in settings if not setting.startswith(LEAVE_OUT)]
    parts = (("write ", written), (LEAVE_OUT, removed))
    return "; ".join(word + ", ".join(names) for word, names in parts if names)


class Cause(Spec):
    """One reason why a run may be slower than expected."""

    id: str
    """Stable name, in kebab-case."""
    message: str
    """The reason, in a sentence."""
    hint: str = ""
    """What to look at or to change."""


class Diagnosis(Spec):
    """A measured speed against what this configuration should reach."""

    measured_tokens_per_s: float
    """Speed that was reached, tokens/s of all GPUs."""
    measured_step_time_s: float
    """Step time at that speed, s."""
    mfu: float
    """Model FLOPs at the measured speed over the peak of all GPUs."""
    model_flops_per_s_per_gpu: float
    """6 per used weight and token (of a mixture of experts: those of the active ones) and causal attention, without
    recomputation."""
    peak_flops_per_s_per_gpu: float
    """Dense, of the job's number format."""
    expected_step_time_s: float
    """Estimate of this configuration, s."""
    expected_step_time_range_s: tuple[float, float]
    """Least and most that the estimate allows, s."""
    slowdown: float
    """Measured over expected step time."""
    as_expected: bool
    """The measured step time is within the range."""
    causes: tuple[Cause, ...]
    """The first to look at first."""


class CheckReport(Spec):
    """Everything that can be said of one configuration."""

    schema_version: int = CHECK_SCHEMA_VERSION
    """Version of this document's form."""
    planner_version: str
    """Version of the planner that wrote it."""
    files: tuple[str, ...]
    """Names of the files that were read."""
    format: str
    """Format that they were read as."""
    backend: str
    """Framework that they are for."""
    legal: bool
    """No finding is an error."""
    fits: bool | None
    """Null where it could not be priced; the warnings say what is missing."""
    findings: tuple[CheckFinding, ...]
    """What its author should know, the worst first."""
    unread: tuple[str, ...]
    """Settings that bear on speed or memory and were not taken into account."""
    assumptions: tuple[Assumption, ...] = ()
    """What neither files nor question say and had to be filled in."""
    warnings: tuple[str, ...] = ()
    """What could not be told, and why."""
    request: Request | None = None
    """The question that the configuration answers; null: it could not be priced."""
    plan: Plan | None = None
    """The configuration as a plan: its strategy and estimate."""
    improvements: tuple[Improvement, ...] = ()
    """What helps, by itself, the best first."""
    suggested: Plan | None = None
    """The best plan of the same framework for the same question, where it was searched for."""
    suggested_settings: tuple[str, ...] = ()
    """What it says differently from the configuration, in the words of the framework's files."""
    diagnosis: Diagnosis | None = None
    """A measured speed against the estimate, where one was given."""

    def to_json_dict(self) -> dict[str, Any]:
        """The document as plain JSON types."""
        document: dict[str, Any] = self.model_dump(mode="json", exclude_none=True)
        document["fits"] = self.fits
        return document
