"""Where a rank stands in a plan: its index in every group, the device meshes, and what the runner cannot do.

Ranks are numbered with tensor parallelism innermost, then context, data and pipeline parallelism; experts are spread
over consecutive ranks of one pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner.backends import get_backend
from planner.cost.context import CostContext
from planner.errors import InputError
from planner.search.legality import refusals
from planner.specs.convert import from_strategy
from planner.specs.strategy import Strategy
from planner.specs.validation import GroupKind, RunConfig


def unsupported(config: RunConfig) -> str | None:
    """The rules of the backend ``pytorch`` that a configuration breaks, with their values; None where it keeps all."""
    contradiction = _contradiction(config)
    if contradiction is not None:
        return contradiction
    context = CostContext(config.model, config.cluster, config.job, get_backend("pytorch"))
    try:
        batch = from_strategy(config.strategy, context.recompute_kinds)
    except InputError as problem:
        return f"{problem.message}: {problem.got}"
    broken = refusals(context, batch)
    return "; ".join(f"{refusal.rule.id}: {refusal.equation}" for refusal in broken) or None


def _contradiction(config: RunConfig) -> str | None:
    """Where strategy and job do not say the same."""
    strategy, job = config.strategy, config.job
    for name in ("seq_len", "precision", "global_batch"):
        mine, other = getattr(strategy, name), getattr(job, name)
        if mine != other:
            return f"strategy.{name}({mine}) = job.{name}({other}) must hold"
    made_up = strategy.micro_batch * strategy.grad_accum * strategy.dp
    if made_up != strategy.global_batch:
        return (
            f"micro_batch({strategy.micro_batch}) * grad_accum({strategy.grad_accum}) * dp({strategy.dp}) = {made_up}, "
            f"must be global_batch({strategy.global_batch})"
        )
    return None


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
