"""What following the usual rule of thumb would cost: its choice is priced by the same search and compared with the
best plan.

The rule looks at memory only (planner/search/heuristic.py); the comparison is asked for, since it takes a search of
its own."""

from __future__ import annotations

from planner.errors import InfeasibleError, InputError
from planner.search.heuristic import baseline
from planner.service.searching import search_backends
from planner.service.words import mesh_words
from planner.specs.plan import Plan, Request
from planner.units import duration, percent


def against_rule_of_thumb(request: Request, best: Plan) -> str:
    """One sentence: what the rule picks for this model and cluster, and how its best plan compares."""
    rule = baseline(request.model, request.cluster, request.job)
    pins = {name: value for name, value in rule.pins.items() if name != "backend"}
    backend = str(rule.pins["backend"])
    asked = request.model_copy(update={"backend": backend, "pins": pins})
    head = f"rule of thumb ({rule.rule}): {rule.why}"
    try:
        found = search_backends(asked, (backend,), 1, None).best
    except (InfeasibleError, InputError) as problem:
        return f"{head}; {backend} has no such plan here ({problem.message})"
    change = found.estimate.step_time_s / best.estimate.step_time_s - 1.0
    speed = f"{percent(abs(change))} {'slower' if change >= 0 else 'faster'} than the plan above"
    return f"{head}; {backend} {mesh_words(found.strategy)}: {duration(found.estimate.step_time_s)}, {speed}"
