"""Where a rank stands in a plan: its index in every group, the device meshes, and what the runner cannot do.

Ranks are numbered with tensor parallelism innermost, then context, data and pipeline parallelism; experts are spread
over consecutive ranks of one pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner.specs.strategy import Strategy
from planner.specs.validation import GroupKind, RunConfig
from planner_validate.model import unsupported as unsupported_model

SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "zb-h1")


def unsupported(config: RunConfig) -> str | None:
    """Why the runner cannot run the configuration, or None."""
    strategy, model, job = config.strategy, config.model, config.job
    cpu = config.device == "cpu"
    checks = {
        f"zero_stage({strategy.zero_stage}): FSDP2 shards everything (3), keeps weights gathered (2), or nothing (0)": (
            strategy.zero_stage == 1
        ),
        "a second, nearer shard of the parameters": strategy.secondary_shard_degree is not None,
        f"etp({strategy.etp}): experts are not split over tensor-parallel ranks": strategy.etp > 1,
        f"pipeline_schedule({strategy.pipeline_schedule}): PyTorch has no such schedule": (
            strategy.pp > 1 and strategy.pipeline_schedule not in SCHEDULES
        ),
        "an embedding tied to the head over several pipeline stages": strategy.pp > 1 and model.tied,
        **_context_parallel(config),
        "offload on a CPU: there is no accelerator to copy from": strategy.offload != type(strategy.offload)() and cpu,
        f"precision {config.strategy.precision}": strategy.precision in ("fp8", "nvfp4"),
        "low-rank adapters": job.task == "lora",
        f"loss {job.loss}": job.loss not in ("auto", "eager"),
        f"samples of {job.sample_tokens} tokens, which do not divide the sequence": bool(
            job.sample_tokens and job.sample_tokens < strategy.seq_len and strategy.seq_len % job.sample_tokens
        ),
        **_tensor_parallel(config),
        **_pipeline(config),
        f"global_batch({strategy.global_batch}) other than micro_batch({strategy.micro_batch}) * "
        f"grad_accum({strategy.grad_accum}) * dp({strategy.dp})": strategy.global_batch
        != strategy.micro_batch * strategy.grad_accum * strategy.dp,
    }
    found = [text for text, present in checks.items() if present]
    model_reason = unsupported_model(model, job.attended_tokens)
    reasons = ([f"the runner does not do {'; '.join(found)}"] if found else []) + (
        [model_reason] if model_reason else []
    )
    return "; ".join(reasons) or None


def _context_parallel(config: RunConfig) -> dict[str, bool]:
    strategy, model, split = config.strategy, config.model, config.strategy.cp > 1
    return {
        f"{model.position} positions under context parallelism": split and model.position not in ("rope", "none"),
        "packed samples under context parallelism": split and config.job.attended_tokens < strategy.seq_len,
        "attention with score matrices under context parallelism": split and not config.job.flash_attention,
        f"seq_len({strategy.seq_len}) over 2 * cp({strategy.cp}) chunks": split
        and strategy.seq_len % (2 * strategy.cp) > 0,
    }


def _tensor_parallel(config: RunConfig) -> dict[str, bool]:
    strategy, model = config.strategy, config.model
    split = strategy.tp > 1
    moe = model.moe
    expert_group = strategy.tp * strategy.cp * strategy.dp
    return {
        f"{model.position} positions under tensor parallelism": split and model.position not in ("rope", "none"),
        "a norm over all queries under tensor parallelism": split and model.qk_norm == "full",
        "experts under tensor parallelism without sequence parallelism": (
            split and moe is not None and not strategy.sequence_parallel
        ),
        f"kv_heads({model.kv_heads}) over tp({strategy.tp})": bool(
            split and (model.heads % strategy.tp or (model.mla is None and model.kv_heads % strategy.tp))
        ),
        f"vocab({model.vocab}) over tp({strategy.tp})": bool(model.vocab % strategy.tp),
        f"seq_len({strategy.seq_len}) over tp({strategy.tp})": bool(
            strategy.sequence_parallel and strategy.seq_len % (strategy.tp * strategy.cp)
        ),
        f"ep({strategy.ep}) over tp * cp * dp({expert_group})": bool(expert_group % strategy.ep),
        f"experts({moe.experts if moe else 0}) over ep({strategy.ep})": bool(moe and moe.experts % strategy.ep),
        f"ep({strategy.ep}) of a model without experts": moe is None and strategy.ep > 1,
    }


def _pipeline(config: RunConfig) -> dict[str, bool]:
    strategy = config.strategy
    if strategy.pp == 1:
        return {"virtual stages without a pipeline": strategy.vpp > 1}
    number, pp = strategy.grad_accum, strategy.pp
    rounds = max(number // pp, 1)
    many = strategy.pipeline_schedule in ("interleaved", "zb-h1")
    return {
        f"pipeline_schedule({strategy.pipeline_schedule}) with vpp({strategy.vpp})": strategy.vpp > 1 and not many,
        f"{number} micro-batches over pp({pp}) in {strategy.pipeline_schedule}": bool(number % rounds)
        if many
        else strategy.pipeline_schedule == "1f1b" and number < pp,
        "a virtual stage without layers": 0 in strategy.layers_per_stage[1:-1],
    }


@dataclass(frozen=True)
class Layout:
    """One rank of a strategy and its process groups."""

    strategy: Strategy
    rank: int
    weights: DeviceMesh
    """Axes pp, replica, shard, tp of the dense weights."""
    experts: DeviceMesh | None
    """Axes pp, expert_replica, expert_shard, ep; None where experts lie like dense weights."""
    sequences: DeviceMesh | None
    """Axes pp, dp, cp, tp; None where every rank holds whole sequences."""

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """Index in every group."""
        s, rank = self.strategy, self.rank
        return {
            "tp": rank % s.tp,
            "cp": rank // s.tp % s.cp,
            "dp": rank // (s.tp * s.cp) % s.dp,
            "pp": rank // (s.tp * s.cp * s.dp),
            "ep": rank % s.ep,
        }

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same dense weights."""
        return self.strategy.dp * self.strategy.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold the same experts."""
        return self.strategy.tp * self.data_ranks // self.strategy.ep

    @cached_property
    def group_kinds(self) -> dict[str, GroupKind]:
        """Process group name -> what it is for."""
        kinds: dict[str, GroupKind] = {"pp": "pp", "replica": "dp", "shard": "dp", "tp": "tp"}
        more: dict[str, GroupKind] = {"pp": "pp", "expert_replica": "dp", "expert_shard": "dp", "ep": "ep"}
        found: dict[str, GroupKind] = {dist.group.WORLD.group_name: "world"}
        shared: dict[str, GroupKind] = {"cp": "cp"}
        for mesh, names in ((self.weights, kinds), (self.experts, more), (self.sequences, shared)):
            if mesh is not None:
                found |= {mesh.get_group(axis).group_name: kind for axis, kind in names.items()}
        return found

    def group(self, axis: str) -> Any:
        """Process group of an axis of any mesh."""
        for mesh in (self.weights, self.experts, self.sequences):
            if mesh is not None and axis in (mesh.mesh_dim_names or ()):
                return mesh.get_group(axis)
        raise ValueError(f"no mesh has the axis {axis}")


def make_layout(config: RunConfig) -> Layout:
    """The layout of this process; the process group must exist and have as many ranks as the strategy has GPUs."""
    s = config.strategy
    shard = s.shard_degree if s.zero_stage else 1
    data = s.dp * s.cp
    weights = init_device_mesh(
        config.device, (s.pp, data // shard, shard, s.tp), mesh_dim_names=("pp", "replica", "shard", "tp")
    )
    experts = None
    if config.model.moe is not None and s.ep * s.tp > 1:
        # The share of their replicas that dense weights are spread over holds for experts too.
        same = s.tp * data // s.ep
        spread = max(same * shard // data, 1) if shard > 1 else 1
        experts = init_device_mesh(
            config.device,
            (s.pp, same // spread, spread, s.ep),
            mesh_dim_names=("pp", "expert_replica", "expert_shard", "ep"),
        )
    sequences = None
    if s.cp > 1:
        sequences = init_device_mesh(config.device, (s.pp, s.dp, s.cp, s.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    return Layout(s, dist.get_rank(), weights, experts, sequences)
