"""From what a configuration states to a whole strategy: degrees, batch algebra, layers of the stages, recomputation.

Nothing is refused here: what does not add up becomes a finding, so that everything wrong with a file is named at once;
what is not stated becomes the framework's default and is returned as an assumption."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from planner.backends import get_backend
from planner.backends.base import NONE, Backend, RecomputeKind
from planner.backends.rule_kit import divisors
from planner.reading import Configuration, StatedStrategy
from planner.service.layout import near_even, one_row, recompute_choice
from planner.specs.batch import DEVICES, EVERY_LAYER, SCHEDULES, StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.finding import Finding
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.plan import Assumption
from planner.specs.strategy import Recompute
from planner.units import counted


@dataclass
class Completed:
    """A configuration as one candidate of a backend."""

    backend: Backend
    job: Job
    batch: StrategyBatch | None
    """One row; None where the degrees or the batch do not add up."""
    assumptions: list[Assumption] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unknown: str = ""
    """What stands in no file, without which any price would be a guess."""


def replicas(stated: StatedStrategy, gpus: int) -> int | None:
    """Data-parallel replicas on ``gpus``; None where the stated degrees do not divide them."""
    return gpus // stated.model_ranks if gpus % stated.model_ranks == 0 else None


def stated_gpus(configuration: Configuration) -> int | None:
    """GPUs that the file says or implies."""
    stated = configuration.strategy
    if configuration.gpus is not None:
        return configuration.gpus
    if stated.dp is None:
        return None
    return stated.dp * stated.model_ranks


def complete(
    configuration: Configuration, model: ModelSpec, cluster: Cluster, job: Job, recompute: str | None = None
) -> Completed:
    """The configuration as a candidate; ``job`` has its sequence length, format and loss, and the global batch where
    the file leaves it open; ``recompute`` (as ``--recompute`` has it) wins over the file."""
    return _Completion(configuration, model, cluster, job, recompute).run()


def _batches(total: int, micro: int, dp: int, accum: int | None) -> str:
    """The nearest global batches on either side; with the accumulation of each where the file states one."""
    step = micro * dp
    near = {total // step} if total % step == 0 else {max(total // step, 1), total // step + 1}
    if accum is None:
        return f"a global batch of {' or '.join(str(n * step) for n in sorted(near))}, or another multiple of {step}"
    return " or ".join(f"a global batch of {n * step} with grad_accum({n})" for n in sorted({*near, accum}))


def _replica_hint(total: int, micro: int, dp: int) -> str:
    """Numbers of replicas that would keep the stated batch."""
    fewer = [n for n in range(1, dp + 1) if total % (micro * n) == 0]
    if not fewer:
        return f"micro_batch({micro}) does not divide the global batch: change one of them"
    kept = f"global_batch({total}) goes with {counted(fewer[-1], 'replica')}"
    accumulation = total // (micro * fewer[-1])
    return f"change one of them; {kept} of micro_batch({micro}) and grad_accum({accumulation})"


class _Completion:
    def __init__(
        self, configuration: Configuration, model: ModelSpec, cluster: Cluster, job: Job, recompute: str | None
    ) -> None:
        self.read, self.stated = configuration, configuration.strategy
        self.model, self.cluster, self.said = model, cluster, recompute
        backend = get_backend(configuration.backend)
        self.backend = backend.with_habits(**configuration.habits) if configuration.habits else backend
        self.done = Completed(self.backend, job, None)

    def run(self) -> Completed:
        dp = self._replicas()
        batch = None if dp is None else self._batch_algebra(dp)
        if dp is None or batch is None:
            return self.done
        micro_batch, global_batch = batch
        self.done.job = self.done.job.model_copy(update={"global_batch": global_batch})
        self.done.batch = self._row(dp, micro_batch)
        return self.done

    def _say(self, name: str, message: str, **words: Any) -> None:
        self.done.findings.append(Finding(id=name, severity="error", message=message, **words))

    def _assume(self, name: str, value: Any, why: str) -> Any:
        self.done.assumptions.append(Assumption(field=f"strategy.{name}", value=value, why=why))
        return value

    def _replicas(self) -> int | None:
        s, gpus = self.stated, self.cluster.gpus
        dp = replicas(s, gpus)
        degrees = f"tp({s.tp or 1}) * cp({s.cp or 1}) * pp({s.pp or 1})"
        if dp is None:
            self._say(
                "world-size",
                f"{degrees} = {s.model_ranks} does not divide the {counted(gpus, 'GPU')}",
                allowed=f"a product that divides {gpus}",
                hint="change a degree or the number of processes",
            )
        elif s.dp is not None and s.dp != dp:
            self._say(
                "world-size",
                f"{degrees} * dp({s.dp}) = {gpus // dp * s.dp}, but the job has {counted(gpus, 'GPU')}",
                allowed=f"dp({dp})",
                hint=f"set the data-parallel size to {dp}, or start {gpus // dp * s.dp} processes",
            )
            # Everything else is judged as the file has it: one wrong number is one finding.
            return s.dp
        return dp

    def _batch_algebra(self, dp: int) -> tuple[int, int] | None:
        """(micro-batch, global batch): any two of micro-batch, accumulation and global batch give the third."""
        s, total = self.stated, self.read.global_batch
        if total is None and s.grad_accum is None:
            total = self.done.job.global_batch
        micro, accum = s.micro_batch, s.grad_accum
        if micro is None:
            micro = total // (dp * accum) if total is not None and accum and total % (dp * accum) == 0 else None
            micro = micro or self._assume("micro_batch", 1, "not stated")
        if total is None:
            total = micro * dp * (accum or 1)
        if accum is None and total % (micro * dp) == 0:
            return micro, total
        if accum is not None and micro * accum * dp == total:
            return micro, total
        steps = "" if accum is None else f" * grad_accum({accum})"
        whole = micro * dp * (accum or 1)
        product = "micro_batch * dp" + (" * grad_accum" if steps else "")
        self._say(
            "batch-algebra",
            f"global_batch({total}) must be micro_batch({micro}) * dp({dp}){steps or ' * a whole number'}",
            got=f"{product} = {whole}, and {total} / {whole} = {total / whole:.4g}",
            allowed=_batches(total, micro, dp, accum),
            hint=_replica_hint(total, micro, dp),
        )
        return None

    def _row(self, dp: int, micro_batch: int) -> StrategyBatch:
        s, backend = self.stated, self.backend
        tp, cp, pp, vpp = s.tp or 1, s.cp or 1, s.pp or 1, s.vpp or 1
        kinds, kind, layers = self._recompute()
        if kinds is not None:
            backend = self.done.backend = backend.with_recompute(*kinds)
        zero = s.zero_stage
        if zero is None:
            self.done.unknown = "how weights, gradients and optimizer are sharded"
            zero = 0
        sequence_parallel = s.sequence_parallel
        if sequence_parallel is None:
            sequence_parallel = tp > 1 and backend.sequence_parallel_choices == (True,)
        if s.shard_degree is not None:
            shard = s.shard_degree
        else:
            shard = (backend.shard_degrees(self.cluster, tp, cp, dp, zero) or (dp * cp,))[0] if zero else 1
        offload = s.offload
        return one_row(
            tp=tp,
            sequence_parallel=bool(sequence_parallel) and tp > 1,
            cp=cp,
            pp=pp,
            vpp=vpp,
            schedule=self._schedule(pp, vpp),
            ep=s.ep or 1,
            etp=s.etp or 1,
            dp=dp,
            zero_stage=zero,
            shard_degree=shard,
            secondary_shard_degree=s.secondary_shard_degree or 0,
            micro_batch=micro_batch,
            recompute_kind=kind,
            recompute_layers=layers,
            offload_optimizer=0.0 if offload is None else offload.optimizer,
            offload_device=0 if offload is None else DEVICES.index(offload.device),
            offload_parameters=0 if offload is None else DEVICES.index(offload.parameters),
            stage_layers=self._stages(pp, vpp),
        )

    def _schedule(self, pp: int, vpp: int) -> int:
        possible = self.backend.schedules(pp, vpp)
        wanted = self.stated.pipeline_schedule
        if wanted is not None and wanted in possible:
            return SCHEDULES.index(wanted)
        if wanted is not None or not possible:
            self._say(
                "pipeline-schedule",
                f"{self.backend.title} has no schedule {wanted or ''} for pp({pp}) and vpp({vpp})",
                allowed=", ".join(possible) or "pp = 1",
            )
        return SCHEDULES.index(possible[0] if possible else "1f1b")

    def _stages(self, pp: int, vpp: int) -> tuple[int, ...]:
        """Layers of the virtual stages; a split that loses layers is a finding and is priced evenly."""
        layers, count = self.model.layers, pp * vpp
        stated = self.stated.layers_per_stage
        if stated is not None and len(stated) == count and sum(stated) == layers:
            return stated
        if stated is not None:
            self._say(
                "layers-lost" if sum(stated) < layers else "layer-split",
                f"the {len(stated)} stages hold {sum(stated)} layers; the model has {layers}, and "
                f"pp({pp}) * vpp({vpp}) = {count} stages",
                allowed=f"{count} stages with {layers} layers in all",
            )
        else:
            default = self.backend.default_layout(self.model, pp, vpp)
            if default is not None:
                return default
            self._say_split(layers, pp, vpp)
        return near_even(layers, min(count, layers)) + (0,) * max(count - layers, 0)

    def _say_split(self, layers: int, pp: int, vpp: int) -> None:
        count = pp * vpp
        if layers % count:
            message = (
                f"layers({layers}) % (pp({pp}) * vpp({vpp})) = {layers % count}, must be 0 unless the layers of every "
                "stage are stated"
            )
        else:
            message = (
                f"{self.backend.title}'s own split of layers({layers}) over pp({pp}) * vpp({vpp}) stages leaves a "
                "stage without a layer: embedding and head take part in it by what they cost"
            )
        self._say(
            "layer-split",
            message,
            allowed=f"pp * vpp in {', '.join(map(str, divisors(layers)[:16]))}" if layers % count else "fewer stages",
            hint=f"change pp or vpp, or state the layers of the stages: {','.join(map(str, near_even(layers, count)))}"
            if layers % count and count < layers
            else "lower pp",
        )

    def _recompute(self) -> tuple[tuple[RecomputeKind, ...] | None, int, int]:
        """(the backend's kinds with the file's own where plans do not offer it, index, recomputed layers)."""
        offered = self.backend.recompute_kinds(self.model, self.done.job)
        if self.said is not None:
            return None, *recompute_choice(self.said, offered)
        wanted = self.stated.recompute
        if wanted is None:
            self._assume("recompute", "none", "not stated (often it is in the code): --recompute full says otherwise")
            wanted = Recompute()
        if wanted.mode == "none":
            return None, next(index for index, kind in enumerate(offered) if kind.mode == "none"), 0
        counts = wanted.layers_per_stage
        most = EVERY_LAYER if counts is None else max(counts)
        for index, kind in enumerate(offered):
            if kind.mode == wanted.mode and sorted(kind.modules) == sorted(wanted.modules):
                return None, index, most
        own = self._own_kind(wanted)
        return (*offered, own), len(offered), most

    def _own_kind(self, wanted: Recompute) -> RecomputeKind:
        """A choice that plans do not make but the framework has."""
        named = self.backend.named_recompute(wanted.modules, self.model) if wanted.mode == "selective" else None
        if named is not None:
            return named
        self._say(
            "recompute-choice",
            f"{self.backend.title} cannot recompute this way with this model",
            got=f"{wanted.mode} {', '.join(wanted.modules)}".strip(),
            allowed="; ".join(kind.id for kind in self.backend.recompute_kinds(self.model, self.done.job)),
        )
        return NONE
