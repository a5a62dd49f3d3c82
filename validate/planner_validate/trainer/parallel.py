"""One stage of the model turned into a rank's part of a plan: tensor parallelism, recomputation, data parallelism.

Tensor parallelism is DTensor's ``parallelize_module``, sharded data parallelism is ``fully_shard``.  Plain data
parallelism in fp32 holds whole parameters and all-reduces each gradient once a step; in 16 bits it is ``fully_shard``
over one rank with the all-reduce in the last micro-batch, for its fp32 master weights and 16-bit copies."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from planner.specs.job import Precision
from planner.specs.strategy import Strategy
from planner_validate.trainer.experts import Experts, Mixture, Router
from planner_validate.trainer.layers import MARKED, Attention, LatentAttention, Norm
from planner_validate.trainer.layout import Layout
from planner_validate.trainer.model import Block, Stage, mark_kept_products, named_parameters

COMPUTE_TYPES: dict[Precision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def parallelize(stage: Stage, layout: Layout, precision: Precision, recomputed: int | None) -> None:
    """Apply the strategy to a stage that was built on any device (meta included); ``recomputed`` of its leading layers
    are recomputed, None means all where the strategy recomputes."""
    strategy = layout.strategy
    if strategy.tp > 1:
        _split_tensors(stage, layout)
    if layout.experts is not None:
        _join_experts(stage, layout)
    _recompute(stage, strategy, recomputed)
    if sharded(strategy, precision):
        _shard(stage, layout, precision)


def sharded(strategy: Strategy, precision: Precision) -> bool:
    """Whether ``fully_shard`` holds the weights; otherwise they are whole on every data-parallel rank."""
    return (strategy.zero_stage > 0 and strategy.shard_degree > 1) or precision != "fp32"


def _split_tensors(stage: Stage, layout: Layout) -> None:
    """Columns, rows and vocabulary over the tensor-parallel ranks; norms and routers stay whole on each."""
    mesh, sequence = layout.weights["tp"], layout.strategy.sequence_parallel
    stream = Shard(1) if sequence else Replicate()
    if stage.embedding is not None:
        stage.embedding.output_placement = stream
        _replace(stage.embedding, mesh, Shard(0))
    for block in stage.layers.values():
        _split_block(block, mesh, stream)
    if stage.head is not None:
        stage.head.input_placement = stream
        _replace(stage.head, mesh, Shard(0))
    for module in stage.modules():
        if isinstance(module, Norm | Router | Mixture):
            module.partial_gradient = sequence
        if not isinstance(module, Experts):
            _replace(module, mesh, Replicate())
    for block in stage.layers.values():
        # Inside a mixer tokens are whole: every rank normalises the heads it has, or the latents of all.
        for name in ("q_norm", "k_norm", "kv_norm"):
            norm = getattr(block.attention, name, None)
            if norm is not None:
                norm.partial_gradient = isinstance(block.attention, Attention)


def _split_block(block: nn.Module, mesh: Any, stream: Any) -> None:
    gathered = partial(PrepareModuleInput, input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {"attention": gathered()}
    columns = ("q_up", "kv_up") if isinstance(block.attention, LatentAttention) else ("q", "k", "v")
    plan |= {f"attention.{name}": ColwiseParallel() for name in columns}
    plan["attention.out"] = RowwiseParallel(output_layouts=stream)
    mixture = isinstance(block.mlp, Mixture)
    if not mixture or block.mlp.shared is not None:
        mlp = "mlp.shared" if mixture else "mlp"
        plan |= {mlp: gathered(), f"{mlp}.up": ColwiseParallel(), f"{mlp}.down": RowwiseParallel(output_layouts=stream)}
        if block.get_submodule(mlp).gate is not None:
            plan[f"{mlp}.gate"] = ColwiseParallel()
    parallelize_module(block, mesh, plan)


def _replace(module: nn.Module, mesh: Any, placement: Any) -> None:
    """Hold the module's own plain parameters as DTensors with one placement."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not isinstance(parameter, DTensor):
            local = parameter.detach()
            if isinstance(placement, Shard):
                local = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
            held = DTensor.from_local(local, mesh, [placement], run_check=False)
            module.register_parameter(name, nn.Parameter(held))


def _join_experts(stage: Stage, layout: Layout) -> None:
    """Give every mixture its group and say where the tokens of the group's ranks start."""
    s = layout.strategy
    first = layout.rank - layout.coordinates["ep"]
    length = s.seq_len // s.cp
    offsets = tuple(
        (rank // s.tp % s.cp) * length + (rank % s.tp) * (length // s.tp if s.sequence_parallel else 0)
        for rank in range(first, first + s.ep)
    )
    for module in stage.modules():
        if isinstance(module, Mixture):
            module.group = layout.group("ep") if s.ep > 1 else None
            module.offsets = offsets


def _recompute(stage: Stage, strategy: Strategy, recomputed: int | None) -> None:
    mode = strategy.recompute.mode
    blocks = [block for block in stage.layers.values() if isinstance(block, Block)]
    for block in blocks[: len(blocks) if recomputed is None else recomputed]:
        if mode == "full":
            block.recompute = {}
        elif mode == "selective":
            block.recompute = {"context_fn": partial(create_selective_checkpoint_contexts, _kept)}
            mark_kept_products(block)


def _kept(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep attention outputs and the marked matrix products, recompute the rest."""
    name = str(operator)
    product = name in ("aten.mm.default", "aten.bmm.default", "aten.addmm.default")
    keep = "scaled_dot_product" in name or (product and MARKED.now)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _shard(stage: Stage, layout: Layout, precision: Precision) -> None:
    """``fully_shard`` of every block and of what lies outside them; gradients are summed, not averaged."""
    strategy = layout.strategy
    compute = COMPUTE_TYPES[precision]
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if strategy.offload.parameters == "cpu" else OffloadPolicy()
    # Under a pipeline weights stay gathered between micro-batches, as PyTorch's stages leave them.
    free = strategy.zero_stage == 3 and strategy.pp == 1
    options = {
        "reshard_after_forward": free,
        "mp_policy": policy if precision != "fp32" else MixedPrecisionPolicy(),
        "offload_policy": offload,
    }
    dense = _data_mesh(layout.weights, "replica", "shard")
    for block in stage.layers.values():
        if layout.experts is not None and isinstance(block.mlp, Mixture):
            fully_shard(block.mlp.experts, mesh=_data_mesh(layout.experts, "expert_replica", "expert_shard"), **options)
        fully_shard(block, mesh=dense, **options)
    # What lies outside the blocks is needed last forward and first backward: it stays gathered between.
    fully_shard(stage, mesh=dense, **{**options, "reshard_after_forward": False})
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _data_mesh(mesh: Any, replica: str, shard: str) -> Any:
    """One axis where every rank of the group has its own shard, two where shards are replicated."""
    return mesh[replica, shard] if mesh[replica].size() > 1 else mesh[shard]


class DataParallel:
    """What data-parallel ranks do with gradients around the micro-batches of one step."""

    def __init__(self, stages: Iterable[Stage], layout: Layout, precision: Precision) -> None:
        self.stages, self.layout = tuple(stages), layout
        strategy = layout.strategy
        self.replicated = not sharded(strategy, precision)
        self._late_reduce = not self.replicated and (strategy.zero_stage == 0 or strategy.shard_degree == 1)
        self._waiting: dict[nn.Parameter, Any] = {}
        self._armed = False
        if self.replicated:
            for parameter in self._parameters():
                parameter.register_post_accumulate_grad_hook(self._ready)

    def _parameters(self) -> Iterable[nn.Parameter]:
        return (parameter for stage in self.stages for _, parameter in named_parameters(stage))

    def before_backward(self, *, last: bool) -> None:
        """Called before the backward pass of each micro-batch where there is no pipeline."""
        self._armed = last
        if self._late_reduce:
            for stage in self.stages:
                if isinstance(stage, FSDPModule):
                    stage.set_requires_all_reduce(last)

    def _ready(self, parameter: Tensor) -> None:
        if self._armed and isinstance(parameter, nn.Parameter):
            self._start(parameter)

    def _start(self, parameter: nn.Parameter) -> None:
        """Sum a gradient over the ranks that hold the parameter, behind the rest of the backward pass."""
        gradient = parameter.grad
        if gradient is None or parameter in self._waiting:
            return
        expert = parameter in self._experts()
        local = gradient
        if isinstance(gradient, DTensor):
            if any(placement.is_partial() for placement in gradient.placements):
                gradient = gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
                parameter.grad = gradient
            local = gradient.to_local()
        ranks = self.layout.expert_ranks if expert else self.layout.data_ranks
        work = None
        if ranks > 1:
            work = dist.all_reduce(
                local, group=self.layout.group("expert_replica" if expert else "replica"), async_op=True
            )
        self._waiting[parameter] = work

    def _experts(self) -> set[nn.Parameter]:
        if self.layout.experts is None:
            return set()
        found = (m for stage in self.stages for m in stage.modules() if isinstance(m, Experts))
        return {parameter for module in found for parameter in module.parameters()}

    def finish(self) -> None:
        """All gradients are summed over their replicas when this returns."""
        if self.replicated:
            for parameter in self._parameters():
                self._start(parameter)
            for work in self._waiting.values():
                if work is not None:
                    work.wait()
            self._waiting.clear()
        self._armed = False

    def copies(self, parameter: Tensor) -> int:
        """Ranks of the whole run that hold the same part of a parameter."""
        number = 1
        if isinstance(parameter, DTensor):
            sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            for placement, size in sizes:
                number *= size if placement.is_replicate() else 1
        if self.replicated:
            expert = isinstance(parameter, nn.Parameter) and parameter in self._experts()
            number *= self.layout.expert_ranks if expert else self.layout.data_ranks
        return number
