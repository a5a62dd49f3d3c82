"""What to look at first where a measurement is outside the stated range, chosen from what the run showed.

A suspect is not a proof: it names the term that explains most of the gap and the usual reason for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.specs.validation import Comparison, GradientCheck, GroupKind
from planner.units import duration, percent
from planner_validate.reports.terms import BETWEEN, FORWARD_BACKWARD, OPTIMIZER, traffic_name

UNSTEADY = 0.10
"""Spread of the step time above which the machine itself is the first suspect."""
MOST_OF_IT = 0.5
"""Share of the gap of a part that waiting for groups must explain to be named instead."""

CALIBRATE = (
    "the constants are published ones, not this machine's: `planner calibrate --on-this-machine` measures the rates "
    "behind them"
)
_MORE_MEMORY: Mapping[str, str] = {
    "weights": "weights are less sharded than planned: look at the shard group and at tied or replicated parameters",
    "gradients": "gradients live longer or whole: look at when they are reduced and freed",
    "optimizer": "optimizer states are larger or less sharded than two fp32 moments: look at the optimizer's options",
    "activations": "more is saved for the backward pass: look at what recomputation leaves out and at kernels that "
    "save copies",
    "buffers": "temporaries and gathered parameters are larger: look at the loss (logits) and at prefetching",
}
_LESS_MEMORY: Mapping[str, str] = {
    "weights": "fewer or narrower weights are held than the plan says",
    "gradients": "gradients are freed earlier than the estimate assumes",
    "optimizer": "optimizer states are smaller than two fp32 moments",
    "activations": "less is saved for the backward pass than the estimate assumes",
    "buffers": "temporaries do not meet the peak as the estimate assumes",
}
_SLOW: Mapping[str, str] = {
    FORWARD_BACKWARD: "kernels are slower than predicted: look at clocks, power limits and other programs",
    OPTIMIZER: "the update is slower than its memory traffic: look for a fused optimizer and at the gradient norm",
    BETWEEN: "time passes between steps: look at the host (data, logging, synchronisation)",
}
_FAST: Mapping[str, str] = {
    FORWARD_BACKWARD: "kernels are faster than predicted",
    OPTIMIZER: "the update is faster than predicted",
    BETWEEN: "less time passes between steps than predicted",
}
_GROUPS: Mapping[GroupKind, str] = {
    "tp": "tensor-parallel",
    "cp": "context-parallel",
    "dp": "data-parallel",
    "pp": "pipeline",
    "ep": "expert-parallel",
    "world": "world",
}


def unsound(gradients: GradientCheck | None, losses: Sequence[float], *, finite: bool = True) -> tuple[str, ...]:
    """What makes a run worthless as training, whatever its speed."""
    found = []
    if gradients is not None and not gradients.passed:
        found.append(
            f"gradients differ from the unsharded model by {gradients.largest_relative_error:.2g} "
            f"(allowed {gradients.tolerance:g}), most in {gradients.worst_parameter or 'an unnamed parameter'}: "
            "the parallel form computes something else"
        )
    if not finite:
        found.append("the loss is not finite: look at the precision and at loss scaling")
    elif len(losses) > 1 and losses[-1] >= losses[0]:
        found.append(
            f"the loss does not fall ({losses[0]:.4g} to {losses[-1]:.4g}): gradients do not reach the weights, or not "
            "with the right scale"
        )
    return tuple(found)


def time_suspects(step: Comparison, terms: Sequence[Comparison], *, profiled: bool) -> tuple[str, ...]:
    """Reasons for a step time outside its range, the likeliest first; at least one."""
    found = []
    if step.spread is not None and step.spread > UNSTEADY:
        found.append(
            f"the machine is not steady: steps spread by {percent(step.spread)}; look for other programs, and run "
            "again with more --steps"
        )
    part = _largest_gap([term for term in terms if term.name in _SLOW])
    if part is None:
        found.append("no part of the step was measured apart")
    else:
        found.append(_waiting(part, terms) or _part(part, terms))
    if not profiled:
        found.append(CALIBRATE)
    return tuple(found)


def _largest_gap(terms: Sequence[Comparison]) -> Comparison | None:
    return max(terms, key=_gap, default=None)


def _gap(term: Comparison) -> float:
    return 0.0 if term.measured is None else abs(term.measured - term.predicted)


def _waits() -> dict[str, str]:
    """Names of the terms of traffic with the words for their groups."""
    return {traffic_name(kind): words for kind, words in _GROUPS.items()}


def _waiting(part: Comparison, terms: Sequence[Comparison]) -> str | None:
    """The group that is waited for most beyond the prediction, where waiting explains most of the gap of forward and
    backward."""
    names = _waits()
    waits = {term.name: term.measured - term.predicted for term in terms if term.name in names and term.measured}
    if part.name != FORWARD_BACKWARD or not waits or part.measured is None:
        return None
    gap = part.measured - part.predicted
    if sum(waits.values()) * gap <= 0 or abs(sum(waits.values())) < MOST_OF_IT * abs(gap):
        return None
    longer = gap > 0
    name = max(waits, key=lambda each: waits[each] if longer else -waits[each])
    term = next(term for term in terms if term.name == name)
    told = f"{names[name]} traffic takes {duration(term.measured or 0.0)} instead of {duration(term.predicted)}"
    if longer:
        return f"{told}: look at the links of these ranks, and at ranks that come late to their collectives"
    return f"{told}: the links are faster than the estimate assumes"


def _part(part: Comparison, terms: Sequence[Comparison]) -> str:
    measured = part.measured or 0.0
    why = (_SLOW if measured > part.predicted else _FAST)[part.name]
    told = f"{part.name} takes {duration(measured)} instead of {duration(part.predicted)}: {why}"
    if part.name == FORWARD_BACKWARD and any(term.name in _waits() and term.measured is None for term in terms):
        told += "; or its traffic, which was not timed apart, takes the difference"
    return told


def memory_suspect(peak: Comparison, terms: Sequence[Comparison]) -> str:
    """The term that explains most of a peak outside its range."""
    measured = peak.measured or 0.0
    more = measured > peak.predicted
    # A term that differs the other way explains nothing of the gap.
    same_way = [term for term in terms if term.measured is not None and (term.measured > term.predicted) == more]
    term = _largest_gap(same_way)
    if term is None or term.measured is None or _gap(term) < 0.1 * abs(measured - peak.predicted):
        where = "the allocator's own share" if "reserved" in peak.name else "something that no term counts"
        return (
            f"peak memory: the gap is in {where}; look at fragmentation and at libraries that allocate for themselves"
        )
    why = (_MORE_MEMORY if more else _LESS_MEMORY)[term.name]
    share = percent(min(1.0, _gap(term) / max(abs(measured - peak.predicted), 1.0)))
    return f"peak memory: {term.name} explain {share} of the gap: {why}"
