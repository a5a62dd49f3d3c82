"""Which model, machines and job an existing configuration is about: options win over the files, and the plan.json that
the planner wrote beside them answers what neither says.

What is missing is a warning, so that the findings of the files are told all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cost.params import total_params
from planner.errors import InputError
from planner.reading import Configuration
from planner.service.checked import Checked, CheckRequest
from planner.service.clusters import resolve_cluster, with_gpus
from planner.service.completion import replicas, stated_gpus
from planner.service.configurations import PLAN_FILE
from planner.service.document import load_plan, read_plan
from planner.service.jobs import resolve_job, supported_precisions
from planner.service.models import PARAMS_TOLERANCE, resolve_model
from planner.service.requests import ClusterInput, StatedModel
from planner.specs.cluster import Cluster
from planner.specs.finding import Finding
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.plan import Assumption, Request
from planner.units import count


def planned_question(asked: CheckRequest, found: Checked) -> Request | None:
    """The question that the planner's own folder answered."""
    try:
        if asked.texts is not None:
            return read_plan(asked.texts[PLAN_FILE], PLAN_FILE).request if PLAN_FILE in asked.texts else None
        plans = [path / PLAN_FILE for path in asked.paths if path.is_dir() and (path / PLAN_FILE).is_file()]
        return load_plan(plans[0]).request if len(plans) == 1 else None
    except InputError as problem:
        found.warnings.append(f"{PLAN_FILE} was left aside: {problem.message}")
        return None


def _as_planned(found: Checked, field: str, value: object) -> None:
    found.assumptions.append(Assumption(field=field, value=str(value), why=f"of {PLAN_FILE} beside the files"))


def model_of(asked: CheckRequest, found: Checked) -> ModelSpec | None:
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
            # A file that came as data must not make this machine's disk be read.
            name = read.model_name if asked.texts is None else StatedModel(name=read.model_name)
            model, assumed, _ = resolve_model(name)
        except InputError:
            found.warnings.append(
                f"not priced: the file names the model {read.model_name!r}, which the catalogue does not have; give "
                "--model NAME, a config.json or a YAML of dimensions"
            )
            return None
        found.assumptions += [*assumed, Assumption(field="model", value=model.name, why="named in the file")]
        return model
    if found.planned is not None:
        _as_planned(found, "model", found.planned.model.name)
        return found.planned.model
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


def cluster_of(asked: CheckRequest, found: Checked) -> Cluster | None:
    """The machines of the options; the number of GPUs may come from the file."""
    given, read = asked.cluster, found.configuration
    if found.planned is not None and replace(given, gpus=None) == ClusterInput():
        cluster = found.planned.cluster
        _as_planned(found, "cluster", f"{cluster.gpus} x {cluster.accelerator.id}")
        return with_gpus(cluster, given.gpus or stated_gpus(read) or cluster.gpus)
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


def job_of(asked: CheckRequest, found: Checked, model: ModelSpec, cluster: Cluster) -> Job:
    """The job of the file, with the options on top."""
    read, given = found.configuration, asked.job
    planned = None if found.planned is None else found.planned.job
    batch = given.global_batch
    if batch is None:
        batch = read.global_batch if read.global_batch is not None else _implied_batch(read, cluster)
    precision = given.precision or read.precision or (planned.precision if planned is not None else None)
    able = supported_precisions(cluster.accelerator)
    if given.precision is None and precision is not None and precision not in able:
        found.findings.append(_without_units(precision, cluster.accelerator.id, able))
        precision = able[0]
    resolved = resolve_job(
        replace(
            given,
            seq_len=given.seq_len or read.seq_len or (None if planned is None else planned.seq_len),
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
