"""Everything that a report says of a plan document, in reading order and as plain text; markup comes later.

The verdict first, then figures, plans, reasons, warnings, assumptions and how far the answer is proven."""

from __future__ import annotations

from dataclasses import dataclass

from planner.report import described
from planner.report.places import PlaceMap, place_map
from planner.report.tables import Figure, Table
from planner.service.ranking import Column, ranking
from planner.service.summary import (
    assumption_lines,
    basis_text,
    best_of_others,
    headline,
    host_text,
    memory_text,
    misfit_text,
    search_text,
)
from planner.service.words import strategy_text
from planner.specs.pictures import Pictures
from planner.specs.plan import OUTSIDE_EXPERIENCE, Plan, PlanDocument
from planner.units import duration, gib, percent


@dataclass(frozen=True)
class Fact:
    """One figure of the verdict, large, with what qualifies it."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Content:
    """A plan document ready to be laid out."""

    headline: str
    strategy: str
    fits: bool
    verdict: str
    """``fits``, or what is too much."""
    memory: str
    facts: tuple[Fact, ...]
    basis: str
    """What the ranges rest on."""
    measured: bool
    """Runs of this kind were measured."""
    plans: Table | None
    """None where nothing was searched."""
    others: tuple[str, ...]
    figures: tuple[Figure, ...]
    places: PlaceMap
    why: tuple[str, ...]
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]
    search: str | None
    version: str
    document_id: str


def content_of(document: PlanDocument, drawn: Pictures) -> Content:
    """The words and tables of ``document`` with the numbers of ``drawn``."""
    best = document.best
    searched = document.search.status != "estimated"
    return Content(
        headline=headline(document),
        strategy=strategy_text(best),
        fits=best.estimate.fits,
        verdict="fits" if best.estimate.fits else misfit_text(best.estimate),
        memory=memory_text(best.estimate),
        facts=_facts(document),
        basis=basis_text(best.estimate),
        measured=OUTSIDE_EXPERIENCE not in best.estimate.range_basis,
        plans=_plans(document) if searched else None,
        others=tuple(line for line in best_of_others(document) if line.endswith("nothing fits")),
        figures=_figures(drawn),
        places=place_map(drawn.topology),
        why=best.why,
        warnings=document.warnings,
        assumptions=tuple(assumption_lines(document.assumptions)),
        search=search_text(document.search) if searched else None,
        version=document.planner_version,
        document_id=document.id,
    )


def _facts(document: PlanDocument) -> tuple[Fact, ...]:
    estimate = document.best.estimate
    facts = [
        Fact("step time, est.", duration(estimate.step_time_s), described.span(*estimate.step_time_range_s)),
        Fact("peak memory, est.", gib(estimate.peak_memory_bytes), _memory_note(document)),
        Fact("throughput, est.", f"{estimate.tokens_per_s_per_gpu:,.0f}", "tokens/s of a GPU"),
        Fact("MFU, est.", percent(estimate.mfu), "of peak"),
    ]
    if estimate.cost_per_million_tokens is not None:
        facts.append(Fact("cost, est.", f"${estimate.cost_per_million_tokens:.3g}", "per million tokens"))
    if host_text(document.best, document.request.cluster) is not None:
        there = gib(document.request.cluster.host_memory_bytes_per_node)
        facts.append(Fact("host memory, est.", gib(estimate.host_memory_bytes_per_node), f"of {there} a node"))
    return tuple(facts)


def _memory_note(document: PlanDocument) -> str:
    estimate = document.best.estimate
    return f"up to {gib(estimate.peak_memory_range_bytes[1])} of {gib(estimate.memory_limit_bytes)}"


def all_plans(document: PlanDocument) -> tuple[Plan, ...]:
    """The best plan, its alternatives, and the best ones of other frameworks that are not among them."""
    ranked = (document.best, *document.alternatives)
    return (*ranked, *(plan for plan in document.by_backend.values() if plan is not None and plan not in ranked))


def _plans(document: PlanDocument) -> Table:
    columns, rows = ranking(all_plans(document))
    names = {"": "rank", "mbs": "micro-batch"}
    heads = tuple(Column(names.get(column.name, column.name), column.justify) for column in columns)
    limit = gib(document.best.estimate.memory_limit_bytes)
    return Table(f"Best first; tok/s of a GPU, memory of {limit}; all figures est.", heads, rows)


def _figures(drawn: Pictures) -> tuple[Figure, ...]:
    figures = [described.points_figure(drawn)] if len(drawn.points) > 1 else []
    figures += [described.stages_figure(drawn), described.time_figure(drawn)]
    if drawn.schedule is not None:
        figures.append(described.schedule_figure(drawn.schedule, drawn.points[0].step_time_s))
    if len(drawn.topology.ranks) > 1:
        figures.append(described.axes_table(drawn))
    if drawn.topology.traffic:
        figures.append(described.traffic_figure(drawn))
    return tuple(figures)
