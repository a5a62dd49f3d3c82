"""From a plan document to what runs here: the plan in the words of the runner with a fresh estimate, the device, and
whether this machine has enough of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.backends import get_backend
from planner.errors import InputError, MissingExtraError
from planner.machines.products import identify
from planner.service.conversion import convert_document
from planner.service.document import load_plan
from planner.service.profiles import profile_for
from planner.service.usecases import estimate_document
from planner.specs.plan import Estimate, PlanDocument
from planner.specs.validation import RunConfig, RunDevice
from planner.units import gib
from planner_validate.runs.devices import Machine, Probe, available_host_bytes, cores, this_machine
from planner_validate.runs.options import WARMUP_STEPS, Options

RUNNER = "pytorch"
"""The backend whose plans the worker trains."""
SLOWER = 10.0
"""A step may take so much longer than the upper end of its range before it counts as standing still."""
PROCESS_BYTES = 450_000_000
"""Host memory of one process with torch before it has allocated anything."""


@dataclass(frozen=True)
class Prepared:
    """A plan and what runs of it."""

    planned: PlanDocument
    """As the user gave it."""
    document: PlanDocument
    """Of the runner's backend, estimated again; with the profile, if one was named."""
    changed: tuple[str, ...]
    """How that differs from the plan."""
    notes: tuple[str, ...] = ()

    @property
    def estimate(self) -> Estimate:
        return self.document.best.estimate

    @property
    def gpus(self) -> int:
        return self.document.best.strategy.gpus


def read(path: Path) -> PlanDocument:
    """The plan.json of a path."""
    return load_plan(path)


def with_profile(document: PlanDocument, profile: Path | None) -> PlanDocument:
    """The document with the constants of a profile; InputError where it is of another accelerator."""
    if profile is None:
        return document
    request = document.request
    found = profile_for(profile, request.cluster)
    return document.model_copy(update={"request": request.model_copy(update={"profile": found})})


def prepared(document: PlanDocument, options: Options) -> Prepared:
    """The plan for the runner, with today's estimate; InputError where the runner cannot train it."""
    asked = with_profile(document, options.profile)
    try:
        converted = convert_document(asked, RUNNER)
        own = estimate_document(converted.document)
    except InputError as problem:
        hint = f"make a plan that PyTorch alone can run: `planner suggest --backend {RUNNER} ...`"
        if document.best.backend != RUNNER:
            title = get_backend(document.best.backend).title
            hint = f"--with-framework runs {title} itself, where it is installed; or {hint}"
        raise InputError(
            problem.message, where="planner validate", got=problem.got, allowed=problem.allowed, hint=hint
        ) from problem
    return Prepared(document, own, converted.lost)


def device_of(document: PlanDocument) -> RunDevice:
    """What the plan's accelerator is to torch."""
    return "cpu" if document.request.cluster.accelerator.synchronous else "cuda"


def runnable(document: PlanDocument, options: Options, probe: Probe = this_machine) -> tuple[Prepared, RunConfig]:
    """What to run on this machine for a plan; raises with the way out where it cannot be run here."""
    found = prepared(document, options)
    _check_processes(found, options)
    machine = probe()
    device = device_of(found.document)
    notes = _check_gpus(found, machine) if device == "cuda" else _check_host(found)
    request, strategy = found.document.request, found.document.best.strategy
    config = RunConfig(
        model=request.model,
        cluster=request.cluster,
        job=request.job,
        strategy=strategy,
        device=device,
        warmup_steps=WARMUP_STEPS,
        measured_steps=options.measured_steps,
        check_gradients=options.check_gradients,
        timeout_s=max(options.timeout_s, SLOWER * found.estimate.step_time_range_s[1]),
        threads=max(1, cores() // found.gpus),
    )
    return Prepared(found.planned, found.document, found.changed, notes), config


def _check_processes(found: Prepared, options: Options) -> None:
    if options.processes is not None and options.processes != found.gpus:
        strategy = found.document.best.strategy
        raise InputError(
            f"the plan has tp {strategy.tp} * pp {strategy.pp} * cp {strategy.cp} * dp {strategy.dp} = "
            f"{found.gpus} ranks",
            where="--nproc",
            got=str(options.processes),
            allowed=str(found.gpus),
            hint="--proxy runs one rank of it here, --memory-only needs no device, and `planner suggest --gpus "
            f"{max(options.processes, 1)} ...` makes a plan for as many",
        )


def _check_gpus(found: Prepared, machine: Machine) -> tuple[str, ...]:
    """Refuse where GPUs are missing; what differs from the planned ones."""
    accelerator = found.document.request.cluster.accelerator
    here = len(machine.gpus)
    if not here:
        raise MissingExtraError(
            f"the plan is for {found.gpus} x {accelerator.id}, and torch {machine.torch} sees no GPU here",
            where="planner validate",
            got="no GPU",
            allowed=f"{found.gpus} x {accelerator.id}",
            hint="--memory-only measures the memory of its ranks without a GPU; `planner suggest --gpu cpu --gpus 2 "
            "...` makes a plan that runs on this machine's processor",
        )
    if here < found.gpus:
        raise MissingExtraError(
            f"the plan needs {found.gpus} GPUs and this machine has {here}",
            where="planner validate",
            got=f"{here} x {machine.gpus[0]}",
            allowed=f"{found.gpus} x {accelerator.id}",
            hint="--proxy runs one rank of it on one GPU; --launcher slurm --out FOLDER writes a job for the whole "
            "plan, and --results FOLDER reads its measurements back",
        )
    return _other_products(accelerator.id, machine.gpus[: found.gpus])


def _other_products(planned: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """GPUs that are not what the plan is for."""
    others = []
    for name in dict.fromkeys(names):
        try:
            same = identify(name).accelerator.id == planned
        except InputError:
            same = False
        if not same:
            others.append(f"planned for {planned}, run on {name}: the estimate is of another device")
    return tuple(others)


def _check_host(found: Prepared) -> tuple[str, ...]:
    """Refuse what would drive this machine out of memory; say where processes outnumber its cores."""
    needed = found.gpus * (PROCESS_BYTES + found.estimate.peak_memory_bytes)
    there = available_host_bytes()
    if there is not None and needed > there:
        raise InputError(
            f"{found.gpus} processes of the plan need about {gib(needed)} of host memory",
            where="planner validate",
            got=f"{gib(there)} available",
            allowed="a plan that fits into the memory of this machine",
            hint="--memory-only allocates nothing; or plan for fewer processes or a smaller model",
        )
    here, planned = cores(), found.document.request.cluster.host_cores_per_node
    notes = []
    if found.gpus > here:
        notes.append(f"{found.gpus} processes share {here} cores: their times depend on how the system schedules them")
    if here != planned:
        notes.append(f"planned for {planned} cores, run on {here}: the estimate of the times is of another machine")
    return tuple(notes)
