"""An existing configuration put to the test: legal, fitting, fast, silently wrong, and what would help most.

Rules, estimate and search are those of plans; only what the file says differently from a plan is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.backends import get_backend
from planner.backends.base import Limit
from planner.cost.context import CostContext
from planner.cost.estimate import estimate as cost_estimate
from planner.errors import InfeasibleError, PlannerError
from planner.search.legality import Refusal, refusals
from planner.service.advice import improvements, lacking
from planner.service.checked import Checked, CheckRequest
from planner.service.completion import Completed, complete
from planner.service.configurations import load_configuration
from planner.service.fit import fewest_gpus, loading, misfit
from planner.service.lints import lints
from planner.service.profiles import context_of, profile_assumption, profile_for
from planner.service.question import cluster_of, job_of, model_of, planned_question
from planner.service.requests import Progress
from planner.service.searching import search_backends
from planner.service.spelling import spelt
from planner.specs.batch import StrategyBatch
from planner.specs.check import CheckFinding, CheckReport, Improvement
from planner.specs.convert import to_strategy
from planner.specs.finding import RANK, Finding
from planner.specs.plan import Plan
from planner.units import counted, gib
from planner.version import __version__


def check(asked: CheckRequest, progress: Progress | None = None) -> CheckReport:
    """Everything that can be said of the configuration; InputError only where it cannot be read at all."""
    found = examine(asked)
    changes: tuple[Improvement, ...] = ()
    suggested: Plan | None = None
    if asked.advise:
        changes = advise(found, progress)
    if found.plan is not None and found.context is not None:
        found.findings += _about_fit(found.context, found.plan, changes)
    if found.configuration.whole_copies and found.context is not None:
        found.findings += loading(found.context)
    stuck = asked.advise and found.plan is not None and not found.plan.estimate.fits and not changes
    if asked.suggest or stuck:
        suggested = _suggested(found, progress)
    return report(found, changes, suggested)


def advise(found: Checked, progress: Progress | None = None) -> tuple[Improvement, ...]:
    """The single changes that help, in the framework's words too; what they and the estimate show joins the
    findings."""
    strategy, request = found.strategy, found.request
    if strategy is None or request is None or found.context is None:
        return ()
    if progress:
        progress("trying single changes")
    own = lacking(found.context).values()
    changes = tuple(
        change.model_copy(update={"settings": spelt(request, found.texts, strategy, change.plan, own)})
        for change in improvements(found.context, strategy, None if found.plan is None else found.plan.estimate)
    )
    known = {finding.id for finding in found.findings}
    told = lints(found.context, strategy, found.plan, changes)
    found.findings += [finding for finding in told if finding.id not in known]
    return changes


def _about_fit(context: CostContext, plan: Plan, changes: Sequence[Improvement]) -> list[Finding]:
    """What is short, and on how many GPUs nothing would be."""
    short = misfit(context, plan)
    enough = fewest_gpus(context, plan.strategy) if short and plan.strategy.zero_stage > 0 else None
    if enough is None:
        return short
    needed, limit = enough.estimate.peak_memory_bytes, enough.estimate.memory_limit_bytes
    more = Finding(
        id="fewest-gpus",
        severity="note",
        message=f"with more replicas the same settings fit on {enough.gpus} GPUs ({counted(enough.nodes, 'node')}): "
        f"{gib(needed)} of {gib(limit)}, global batch {enough.global_batch}",
        hint=f"--gpus {enough.gpus}"
        + (f", or one of the changes below on the {context.cluster.gpus} GPUs" if changes else ""),
    )
    return [*short, more]


def report(found: Checked, changes: Sequence[Improvement] = (), suggested: Plan | None = None) -> CheckReport:
    """The document of what was found."""
    return CheckReport(
        planner_version=__version__,
        files=found.files,
        format=found.configuration.format,
        backend=found.configuration.backend,
        legal=found.legal,
        fits=found.fits,
        findings=tuple(
            CheckFinding.model_validate(each.told())
            for each in sorted(found.findings, key=lambda each: RANK[each.severity])
        ),
        unread=found.configuration.unread,
        assumptions=tuple(found.assumptions),
        warnings=tuple(dict.fromkeys(found.warnings)),
        request=found.request,
        plan=found.plan,
        improvements=tuple(changes),
        suggested=suggested,
        suggested_settings=_in_its_words(found, suggested),
    )


def _in_its_words(found: Checked, suggested: Plan | None) -> tuple[str, ...]:
    """What to write for a plan, which has the settings that plans have, too."""
    if suggested is None or found.strategy is None or found.request is None or found.context is None:
        return ()
    return (*spelt(found.request, found.texts, found.strategy, suggested), *lacking(found.context).values())


def examine(asked: CheckRequest) -> Checked:
    """Reads the configuration, completes it, and puts it to the rules and the cost model."""
    configuration, texts = load_configuration(asked.paths, asked.reader, asked.texts)
    found = Checked(configuration, texts, findings=list(configuration.findings))
    found.planned = planned_question(asked, found)
    found.model = model_of(asked, found)
    found.cluster = cluster_of(asked, found)
    if found.cluster is not None:
        architecture = found.cluster.accelerator.architecture
        found.findings = [finding for finding in found.findings if architecture not in finding.unless]
    if found.model is None or found.cluster is None:
        return found
    if asked.profile is not None:
        found.profile = profile_for(asked.profile, found.cluster)
        found.assumptions.append(profile_assumption(found.profile))
    job = job_of(asked, found, found.model, found.cluster)
    completed = found.completed = complete(configuration, found.model, found.cluster, job, asked.recompute)
    found.findings = _joined(found.findings, completed.findings)
    found.assumptions += completed.assumptions
    request = found.request
    if completed.batch is None or request is None:
        found.warnings.append("not priced: the degrees or the batch do not add up")
        return found
    # A profile's memory factor is part of the backend, so what the file changes is put on top of it.
    context = context_of(request, configuration.backend)
    backend = completed.backend.with_habits(memory_factor=context.backend.habits.memory_factor)
    found.context = context = replace(context, backend=backend)
    found.findings = [_of_no_consequence(each, completed.batch) for each in found.findings]
    broken = refusals(context, completed.batch)
    known = {finding.id for finding in found.findings}
    found.findings += [_as_finding(refusal) for refusal in broken if refusal.rule.id not in known]
    _price(found, context, completed, {refusal.rule.limit for refusal in broken})
    return found


def _of_no_consequence(finding: Finding, batch: StrategyBatch) -> Finding:
    """A finding about replicas where there is one only is a note."""
    alone = int(batch.dp[0]) * int(batch.cp[0]) == 1
    return replace(finding, severity="note") if alone and finding.id == "distributed-optimizer-off" else finding


SAME_MISTAKE = {"batch-algebra": ("batch-mismatch", "batch-divisible"), "world-size": ("world-size",)}
"""Finding of the completion -> what readers call the same, from the file alone."""


def _joined(read: Sequence[Finding], completed: Sequence[Finding]) -> list[Finding]:
    """Findings of the file and of its completion; where both say one thing, it is said once: at the file's place, with
    the way out of the one that knows the replicas."""
    kept, rest = list(read), []
    for each in completed:
        same = next((known for known in kept if known.id in SAME_MISTAKE.get(each.id, ())), None)
        if same is None:
            rest.append(each)
        elif same.id == "batch-mismatch":
            kept.remove(same)
            rest.append(replace(each, where=same.where, hint=f"{same.hint}; or {each.hint}"))
        else:
            whole = replace(same, allowed=same.allowed or each.allowed, hint=same.hint or each.hint)
            kept[kept.index(same)] = whole
    return [*kept, *rest]


def _price(found: Checked, context: CostContext, completed: Completed, limits: set[Limit]) -> None:
    """The estimate, unless the framework refuses the configuration or the cost model does not cover it."""
    if completed.batch is None or completed.findings or "framework" in limits:
        why = "this cannot be priced here" if found.legal else "the framework would refuse it"
        found.warnings.append(f"not priced: {why}")
        return
    if completed.unknown:
        found.warnings.append(f"not priced: none of the files says {completed.unknown}")
        return
    if "planner" in limits:
        found.warnings.append(f"not priced: no estimate covers what the warnings say of {context.backend.title}")
        return
    try:
        estimate = cost_estimate(context, completed.batch)
    except PlannerError as problem:
        found.warnings.append(f"not priced: {problem.message}")
        return
    strategy = to_strategy(completed.batch, 0, context.recompute_kinds, completed.job)
    found.plan = Plan(backend=found.configuration.backend, strategy=strategy, estimate=estimate)


def _as_finding(refusal: Refusal) -> Finding:
    """The rule with its equation and what would be allowed: wrong only where the framework itself refuses it."""
    rule = refusal.rule
    return Finding(
        id=rule.id,
        severity="error" if rule.limit == "framework" else "warning",
        message=f"{rule.reason} ({rule.source})",
        got=refusal.equation,
        allowed=refusal.allowed or "",
        hint="" if rule.limit == "framework" else "a limit of the planner: the framework itself may run this",
    )


def _suggested(found: Checked, progress: Progress | None) -> Plan | None:
    """The best plan of the same framework for the same question."""
    request = found.request
    if request is None:
        found.warnings.append("no search: model, machines and batch must be known first")
        return None
    name = get_backend(found.configuration.backend).name
    try:
        tell = None if progress is None else lambda state: progress(str(state))
        searched = search_backends(request, (name,), 1, None, tell)
    except InfeasibleError as problem:
        changes = problem.details.get("relaxations") or ([problem.hint] if problem.hint else [])
        found.warnings.append("; ".join([problem.message, *changes]))
        return None
    if searched.interrupted:
        raise KeyboardInterrupt
    return searched.best
