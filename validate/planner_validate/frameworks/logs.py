"""What training frameworks print while they run: step times, losses, memory and errors, read from their logs.

One ``LogFormat`` a framework holds the expressions and the source that they were read from; a log that is cut short
or mixed from several ranks gives what can be read of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from planner.specs.validation import FailureKind, RankFailure
from planner.units import GIB, MIB

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|(?i:nan|inf))"

Amounts = Mapping[str, float]
"""What one printed unit is worth: ``tokens`` of a step on one GPU, ``samples`` of a step."""


@dataclass(frozen=True)
class LogFormat:
    """How one framework reports its steps."""

    title: str
    source: str
    """Release and file that the lines were read from."""
    step: re.Pattern[str]
    """Groups: ``step``, one of ``ms``, ``seconds``, ``tokens_per_s`` (a GPU) and ``samples_per_s``; perhaps ``loss``
    and what ``memory`` has."""
    losses: re.Pattern[str] | None = None
    """Groups ``step`` and ``loss``, where they stand on a line of their own."""
    memory: re.Pattern[str] | None = None
    """Groups: perhaps ``rank``; ``allocated`` and ``reserved``, at least one of them, at their largest."""
    memory_unit: int = GIB
    """Bytes of one unit of the printed memory."""


@dataclass(frozen=True)
class MemoryRead:
    """Largest memory of one rank, in bytes."""

    allocated: int | None = None
    reserved: int | None = None

    def larger(self, other: MemoryRead) -> MemoryRead:
        return MemoryRead(_larger(self.allocated, other.allocated), _larger(self.reserved, other.reserved))

    @property
    def peak(self) -> int:
        """What the allocator held where it was printed, else what was in use."""
        return self.reserved or self.allocated or 0


def _larger(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


@dataclass
class RunLog:
    """What was read."""

    seconds: dict[int, float] = field(default_factory=dict)
    """Step -> seconds of the slowest rank that printed it."""
    losses: dict[int, float] = field(default_factory=dict)
    memory: dict[int | None, MemoryRead] = field(default_factory=dict)
    """Rank (None: the line does not say which) -> memory over all steps."""
    failures: tuple[RankFailure, ...] = ()


MEGATRON = LogFormat(
    title="Megatron-LM",
    source="megatron-core 0.20, megatron/training/training.py (training_log) and utils/common_utils.py (report_memory)",
    step=re.compile(
        rf" iteration\s+(?P<step>\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\): (?P<ms>{_NUMBER}) \|"
        rf"(?:.*?\blm loss: (?P<loss>{_NUMBER}) \|)?"
    ),
    memory=re.compile(
        rf"\[Rank (?P<rank>\d+)\] \(after \d+ iterations\) memory \(MB\) \|.*?max allocated: (?P<allocated>{_NUMBER})"
        rf" \|.*?max reserved: (?P<reserved>{_NUMBER})"
    ),
    memory_unit=MIB,
)

TORCHTITAN = LogFormat(
    title="torchtitan",
    source="torchtitan 0.3.0, torchtitan/components/metrics.py (MetricsProcessor.log)",
    step=re.compile(
        rf"(?<!validate )\bstep:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>{_NUMBER})\s.*?memory:\s*(?P<reserved>{_NUMBER})GiB"
        rf"\(.*?tps: (?P<tokens_per_s>{_NUMBER})"
    ),
)

OWN_SCRIPT = LogFormat(
    title="a script that the planner wrote",
    source="templates/fsdp/example_train.py.j2 and planner_validate/frameworks/deepspeed_script.py",
    step=re.compile(
        rf"^step (?P<step>\d+)  loss (?P<loss>{_NUMBER})  (?P<seconds>{_NUMBER}) s  peak (?P<reserved>{_NUMBER}) GiB",
        re.MULTILINE,
    ),
)

DEEPSPEED = LogFormat(
    title="DeepSpeed",
    source="DeepSpeed 0.19, deepspeed/utils/timer.py (ThroughputTimer.stop)",
    step=re.compile(
        rf"global_step=(?P<step>\d+), RunningAvgSamplesPerSec={_NUMBER}, "
        rf"CurrSamplesPerSec=(?P<samples_per_s>{_NUMBER}), "
        rf"MemAllocated={_NUMBER}GB, MaxMemAllocated=(?P<allocated>{_NUMBER})GB"
    ),
    # What the script of planner_validate prints.
    losses=OWN_SCRIPT.step,
)
"""The pipeline engine prints through the same timer."""


def read_log(text: str, form: LogFormat, amounts: Amounts) -> RunLog:
    """Everything that ``form`` knows in the output of a run, of one rank or of several mixed."""
    plain = _COLOUR.sub("", text)
    read = RunLog()
    for match in form.step.finditer(plain):
        groups = match.groupdict()
        step = int(groups["step"])
        seconds = _seconds(groups, amounts)
        if seconds is not None:
            read.seconds[step] = max(seconds, read.seconds.get(step, 0.0))
        loss = _number(groups.get("loss"))
        # Ranks that do not know the loss print a negative one.
        if loss is not None and not loss < 0:
            read.losses[step] = loss
        _remember(read, groups, form.memory_unit)
    for match in form.losses.finditer(plain) if form.losses else ():
        read.losses[int(match["step"])] = float(match["loss"])
    for match in form.memory.finditer(plain) if form.memory else ():
        _remember(read, match.groupdict(), form.memory_unit)
    read.failures = read_failures(plain)
    return read


def _number(text: str | None) -> float | None:
    return None if text is None else float(text.replace(",", ""))


def _seconds(groups: Mapping[str, str | None], amounts: Amounts) -> float | None:
    """Of one step, from whichever form the line has it in; None where it is no positive number."""
    per_unit = {"ms": 1e-3, "seconds": 1.0}
    for name, factor in per_unit.items():
        value = _number(groups.get(name))
        if value is not None:
            return value * factor if value > 0 else None
    for name, amount in (("tokens_per_s", "tokens"), ("samples_per_s", "samples")):
        rate = _number(groups.get(name))
        if rate is not None and 0 < rate < float("inf"):
            return amounts[amount] / rate
    return None


def _remember(read: RunLog, groups: Mapping[str, str | None], unit: int) -> None:
    values = {name: _number(groups.get(name)) for name in ("allocated", "reserved")}
    found = MemoryRead(**{name: None if value is None else round(value * unit) for name, value in values.items()})
    # Zero is what a run without a GPU prints.
    if found.peak == 0:
        return
    rank = groups.get("rank")
    key = None if rank is None else int(rank)
    read.memory[key] = found.larger(read.memory.get(key, MemoryRead()))


_KINDS: tuple[tuple[FailureKind, re.Pattern[str]], ...] = (
    (
        "out-of-memory",
        re.compile(r"OutOfMemoryError|CUDA out of memory|can't allocate memory|\bMemoryError\b|hipErrorOutOfMemory"),
    ),
    (
        "timeout",
        re.compile(r"Watchdog caught collective operation timeout|Timed out waiting|DistStoreError.*[Tt]imed out"),
    ),
    ("killed", re.compile(r"Signal \d+ \(SIG(?:KILL|SEGV|BUS|ABRT)\) received|exitcode\s*: -\d+")),
    ("mismatch", re.compile(r"world[ _]size.*(?:not divisible|must be|does not|!=)", re.IGNORECASE)),
)
_RAISED = re.compile(
    r"^(?:\[(?:default)?(?:rank)?(?P<rank>\d+)\]:?\s*)?"
    r"(?P<error>(?:[A-Za-z_][\w.]*(?:Error|Exception)\b|\S+\.py: error:).*)$"
)
_CONSEQUENCES = re.compile(r"ChildFailedError|SignalException|Connection (?:reset|closed|refused)|Broken pipe")
"""What the other processes and the launcher say once one process has failed."""
_WARNS = re.compile(r"\bwarn", re.IGNORECASE)
_SHOWN = 500


def read_failures(text: str) -> tuple[RankFailure, ...]:
    """Errors in a log, causes before their consequences, each text once."""
    found: dict[str, RankFailure] = {}
    for line in text.splitlines():
        raised = _RAISED.match(line.strip())
        kind = _kind(line)
        if raised is None and (kind not in ("timeout", "killed") or _WARNS.search(line)):
            continue
        message = (raised["error"] if raised else line).strip()[:_SHOWN]
        rank = int(raised["rank"]) if raised and raised["rank"] else None
        found.setdefault(message, RankFailure(rank=rank, kind=kind or "error", phase="training", message=message))
    return _causes_first(found.values())


def _kind(line: str) -> FailureKind | None:
    return next((kind for kind, pattern in _KINDS if pattern.search(line)), None)


def _causes_first(failures: Iterable[RankFailure]) -> tuple[RankFailure, ...]:
    """An exhausted memory explains a lost connection, never the other way round; otherwise as they were printed."""
    weight = {"out-of-memory": 0, "mismatch": 1, "error": 2, "killed": 3, "timeout": 4, "interrupted": 5}

    def order(failure: RankFailure) -> tuple[bool, int]:
        return bool(_CONSEQUENCES.search(failure.message)), weight[failure.kind]

    return tuple(sorted(failures, key=order))
