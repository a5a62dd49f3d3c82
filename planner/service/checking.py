"""An existing configuration put to the test: legal, fitting, fast, silently wrong, and what would help most.

Rules, estimate and search are those of plans; only what the file says differently from a plan is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from planner.backends import get_backend
from planner.backends.base import Limit
from planner.cost.context import CostContext
from planner.cost.estimate import estimate as cost_estimate
from planner.cost.params import total_params
from planner.errors import InfeasibleError, InputError, PlannerError
from planner.reading import Configuration
from planner.search.legality import Refusal, refusals
from planner.service.advice import improvements, lacking
from planner.service.clusters import resolve_cluster
from planner.service.completion import Completed, complete, replicas, stated_gpus
from planner.service.configurations import load_configuration
from planner.service.fit import ABOUT_FIT, fewest_gpus, loading, misfit
from planner.service.jobs import resolve_job, supported_precisions
from planner.service.lints import lints
from planner.service.models import PARAMS_TOLERANCE, resolve_model
from planner.service.profiles import context_of, profile_assumption, profile_for
from planner.service.requests import ClusterInput, JobInput, Progress
from planner.service.searching import search_backends
from planner.service.spelling import spelt
from planner.specs.batch import StrategyBatch
from planner.specs.check import CheckFinding, CheckReport, Improvement
from planner.specs.cluster import Cluster
from planner.specs.convert import to_strategy
from planner.specs.finding import RANK, Finding
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.plan import Assumption, Plan, Request
from planner.specs.profile import Profile
from planner.specs.strategy import Strategy
from planner.units import count, counted, gib
from planner.version import __version__


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What is asked about a configuration; options win over the file."""

    paths: tuple[Path, ...]
    reader: str | None = None
    """Name of the format; None: recognised."""
    model: str | None = None
    cluster: ClusterInput = field(default_factory=ClusterInput)
    job: JobInput = field(default_factory=JobInput)
    profile: Path | None = None
    recompute: str | None = None
    """As the strategy option has it, where the file does not say or should be overruled."""
    suggest: bool = False
    """Search for the best plan of the same framework, too."""
    advise: bool = True
    """Try single changes."""


@dataclass
class Checked:
    """A configuration with everything that could be worked out about it."""

    configuration: Configuration
    texts: Mapping[str, str]
    """The files by name."""
    findings: list[Finding] = field(default_factory=list)
    assumptions: list[Assumption] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    model: ModelSpec | None = None
    cluster: Cluster | None = None
    profile: Profile | None = None
    completed: Completed | None = None
    context: CostContext | None = None
    """With the backend as the file runs it."""
    plan: Plan | None = None

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted(self.texts))

    @property
    def strategy(self) -> Strategy | None:
        """What the file says as a strategy, also where the framework refuses it."""
        if self.context is None or self.completed is None or self.completed.batch is None:
            return None
        return to_strategy(self.completed.batch, 0, self.context.recompute_kinds, self.completed.job)

    @property
    def legal(self) -> bool:
        return not any(finding.severity == "error" and finding.id not in ABOUT_FIT for finding in self.findings)

    @property
    def fits(self) -> bool | None:
        if self.plan is None:
            return None
        return self.plan.estimate.fits and not any(finding.id in ABOUT_FIT for finding in self.findings)

    @property
    def request(self) -> Request | None:
        if self.model is None or self.cluster is None or self.completed is None:
            return None
        return Request(
            model=self.model,
            cluster=self.cluster,
            job=self.completed.job,
            backend=self.configuration.backend,
            profile=self.profile,
        )


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
    configuration, texts = load_configuration(asked.paths, asked.reader)
    found = Checked(configuration, texts, findings=list(configuration.findings))
    found.model = _model(asked, found)
    found.cluster = _cluster(asked, found)
    if found.cluster is not None:
        architecture = found.cluster.accelerator.architecture
        found.findings = [finding for finding in found.findings if architecture not in finding.unless]
    if found.model is None or found.cluster is None:
        return found
    if asked.profile is not None:
        found.profile = profile_for(asked.profile, found.cluster)
        found.assumptions.append(profile_assumption(found.profile))
    job = _job(asked, found, found.model, found.cluster)
    if job is None:
        return found
    completed = found.completed = complete(configuration, found.model, found.cluster, job, asked.recompute)
    found.findings = _joined(found.findings, completed.findings)
    found.assumptions += completed.assumptions
    request = found.request
    if completed.batch is None or request is None:
        found.warnings.append("not priced: the degrees or the batch do not add up")
        return found
    # A profile's memory factor is part of the backend, so what the file changes is put on top of it.
    context = context_of(request, configuration.backend)
    backend = completed.backend.with_habits(allocator_factor=context.backend.habits.allocator_factor)
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


def _model(asked: CheckRequest, found: Checked) -> ModelSpec | None:
    """The model of the option, of the file's dimensions, or of the name in the file."""
    read = found.configuration
    if asked.model is not None:
        model, assumed, warnings = resolve_model(asked.model)
        found.assumptions += assumed
        found.warnings += warnings
        # What the file states is what would run, whatever it is called.
        return read.model if read.model is not None and _differs(model, read.model, found) else model
    if read.model is not None:
        return read.model
    if read.model_name is not None:
        try:
            model, assumed, _ = resolve_model(read.model_name)
        except InputError:
            found.warnings.append(
                f"not priced: the file names the model {read.model_name!r}, which the catalogue does not have; give "
                "--model NAME, a config.json or a YAML of dimensions"
            )
            return None
        found.assumptions += [*assumed, Assumption(field="model", value=model.name, why="named in the file")]
        return model
    found.warnings.append("not priced: the file does not say which model it is for; give --model")
    return None


def _differs(model: ModelSpec, stated: ModelSpec, found: Checked) -> bool:
    """Whether the dimensions of the file are another model than the named one, with a finding if so."""
    named, dims = total_params(model), total_params(stated)
    if abs(dims - named) <= PARAMS_TOLERANCE * named:
        return False
    found.findings.append(
        Finding(
            id="model-differs",
            severity="warning",
            message=f"the file's dimensions make {count(dims)} parameters, not the {count(named)} of {model.name}: "
            "what follows is about the file's dimensions",
            got=f"layers({stated.layers}), hidden({stated.hidden}), heads({stated.heads})",
            allowed=f"layers({model.layers}), hidden({model.hidden}), heads({model.heads})",
            hint=f"correct the dimensions if {model.name} is meant, else leave --model out",
        )
    )
    return True


def _cluster(asked: CheckRequest, found: Checked) -> Cluster | None:
    """The machines of the options; the number of GPUs may come from the file."""
    given, read = asked.cluster, found.configuration
    if given.gpu is None and given.file is None:
        found.warnings.append("not priced: name the accelerator with --gpu (or the machines with --cluster)")
        return None
    if given.gpus is None and given.nodes is None:
        gpus = stated_gpus(read)
        if gpus is not None:
            given = replace(given, gpus=gpus)
            found.assumptions.append(Assumption(field="cluster.gpus", value=gpus, why="stated in the file"))
    if given.gpus_per_node is None and read.gpus_per_node is not None and _is_node(read.gpus_per_node, given):
        given = replace(given, gpus_per_node=read.gpus_per_node)
    if given.gpus is None and given.nodes is None and given.file is None:
        found.warnings.append("not priced: the file does not say on how many GPUs it runs; give --gpus")
        return None
    try:
        resolved = resolve_cluster(given)
    except InputError as problem:
        if given.gpus is None or given.gpus == asked.cluster.gpus:
            raise
        # The options are fine: what the file says of its GPUs is told with everything else that it says.
        found.warnings.append(f"not priced: by the file, {problem.message}; {problem.hint}")
        return None
    found.assumptions += resolved.assumptions
    return resolved.cluster


def _is_node(started: int, given: ClusterInput) -> bool:
    """Whether the processes that a launcher starts on a node are all GPUs of that node: not where the job fills no such
    nodes, and not where one node holds the job, as ``suggest`` takes it."""
    if given.gpus is None:
        return True
    if given.gpus > started:
        return given.gpus % started == 0
    return given.gpus > resolve_cluster(replace(given, gpus=1, nodes=None)).cluster.gpus_per_node


def _job(asked: CheckRequest, found: Checked, model: ModelSpec, cluster: Cluster) -> Job | None:
    """The job of the file, with the options on top."""
    read, given = found.configuration, asked.job
    batch = given.global_batch
    if batch is None:
        batch = read.global_batch if read.global_batch is not None else _implied_batch(read, cluster)
    precision = given.precision or read.precision
    able = supported_precisions(cluster.accelerator)
    if given.precision is None and precision is not None and precision not in able:
        found.findings.append(_without_units(precision, cluster.accelerator.id, able))
        precision = able[0]
    resolved = resolve_job(
        replace(
            given,
            seq_len=given.seq_len if given.seq_len is not None else read.seq_len,
            global_batch=batch,
            precision=precision,
            loss=read.loss or given.loss,
            flash_attention=given.flash_attention and read.flash_attention is not False,
        ),
        model,
        cluster,
    )
    found.assumptions += resolved.assumptions
    found.warnings += resolved.warnings
    job = resolved.job
    return job if read.task is None else job.model_copy(update={"task": read.task})


def _without_units(precision: str, accelerator: str, able: Sequence[str]) -> Finding:
    """A number format that the machines cannot multiply in; the rest is said of the format to take instead."""
    return Finding(
        id="precision-without-units",
        severity="error",
        message=f"the file trains in {precision}, for which {accelerator} has no matrix units: it is refused, or "
        f"emulated many times slower; what follows is for {able[0]}",
        got=precision,
        allowed=", ".join(able),
        hint=f"switch {precision} off and {able[0]} on",
    )


def _implied_batch(read: Configuration, cluster: Cluster) -> int | None:
    """Micro-batch (1 where it is not stated) times accumulation times replicas, where the file states the second."""
    stated = read.strategy
    dp = stated.dp or replicas(stated, cluster.gpus)
    if stated.grad_accum is None or dp is None:
        return None
    return (stated.micro_batch or 1) * stated.grad_accum * dp


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
        searched = search_backends(request, (name,), 1, None, progress)
    except InfeasibleError as problem:
        changes = problem.details.get("relaxations") or ([problem.hint] if problem.hint else [])
        found.warnings.append("; ".join([problem.message, *changes]))
        return None
    if searched.interrupted:
        raise KeyboardInterrupt
    return searched.best
