"""A decoder built from a model's dimensions, or the slice of it that one pipeline stage holds.

``initialise`` gives every parameter values that depend on its name
alone, so that any split of the model starts from the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from planner.specs.model import Mixer, Mlp, ModelSpec
from planner_validate.trainer.experts import Experts, Mixture
from planner_validate.trainer.layers import Attention, Core, LatentAttention, Norm, Rotary, mark
from planner_validate.trainer.layers import Mlp as DenseMlp

INITIAL_SPREAD = 0.02
"""Standard deviation of the matrices' initial values."""
EXACT_ELEMENTS = 1 << 24
"""Largest parameter that is generated whole before a rank takes its part; of a larger one every rank generates its own
part, which is then another one for another split."""


class Block(nn.Module):
    """Norm, mixer, norm, MLP around a residual stream; sub-norms and the parallel form where the model has them."""

    def __init__(self, mixer: nn.Module, mlp: nn.Module, spec: ModelSpec) -> None:
        super().__init__()
        self.parallel = spec.parallel_block
        self.attention_norm = Norm(spec.norm, spec.hidden)
        self.attention = mixer
        self.mlp_norm = Norm(spec.norm, spec.hidden) if spec.norms_per_layer > 1 else None
        self.mlp = mlp
        post = spec.norms_per_layer == 4
        self.attention_post_norm = Norm(spec.norm, spec.hidden) if post else None
        self.mlp_post_norm = Norm(spec.norm, spec.hidden) if post else None
        self.recompute: Any = None
        """Arguments of the checkpoint around the block; None keeps every saved tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)"""
        if self.recompute is None or not torch.is_grad_enabled():
            return self._compute(x)
        return checkpoint(self._compute, x, use_reentrant=False, preserve_rng_state=False, **self.recompute)

    def _compute(self, x: Tensor) -> Tensor:
        normal = self.attention_norm(x)
        if self.parallel:
            other = normal if self.mlp_norm is None else self.mlp_norm(x)
            return x + self.attention(normal) + self.mlp(other)
        x = x + _after(self.attention(normal), self.attention_post_norm)
        if self.mlp_norm is None:
            raise ValueError("a sequential block needs a norm in front of its MLP")
        return x + _after(self.mlp(self.mlp_norm(x)), self.mlp_post_norm)


def mark_kept_products(block: Block) -> None:
    """About every second matrix product: query and value (of latent attention query and joint keys and values) and the
    first matrix of the MLP; the backend ``pytorch`` counts the same ones."""
    for module in block.modules():
        if isinstance(module, LatentAttention):
            mark(module.q_up)
            mark(module.kv_up)
        elif isinstance(module, Attention):
            mark(module.q)
            mark(module.v)
        elif isinstance(module, DenseMlp):
            mark(module.up if module.gate is None else module.gate)
        elif isinstance(module, Experts):
            module.keeps_first = True


def _after(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)


class Embedding(nn.Module):
    """Token table; where its rows are split over tensor-parallel ranks each looks up its own, and the sum is the
    embedding."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab, spec.hidden))
        self.output_placement: Any = None
        """How tensor-parallel ranks hold the output; None without them."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(b, s) -> (b, s of this rank, h)"""
        if not isinstance(self.weight, DTensor):
            return functional.embedding(tokens, self.weight)
        mesh, table = self.weight.device_mesh, self.weight.to_local()
        index = tokens - mesh.get_local_rank() * table.shape[0]
        elsewhere = (index < 0) | (index >= table.shape[0])
        part = functional.embedding(index.masked_fill(elsewhere, 0), table).masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        summed = DTensor.from_local(part, mesh, [Partial()], run_check=False)
        return summed.redistribute(mesh, [self.output_placement]).to_local()


class Head(nn.Module):
    """Output matrix, its own or the embedding's; a split vocabulary gives a rank its share of the logits."""

    def __init__(self, spec: ModelSpec, *, own: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab, spec.hidden)) if own else None
        self.bias = nn.Parameter(torch.empty(spec.vocab)) if spec.head_bias else None
        self.input_placement: Any = None
        """How tensor-parallel ranks hold the input; None without them."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, vocabulary of this rank)"""
        if not isinstance(table, DTensor):
            return functional.linear(x, table, self.bias)
        mesh = table.device_mesh
        gathered = DTensor.from_local(x, mesh, [self.input_placement], run_check=False)
        return functional.linear(gathered.redistribute(mesh, [Replicate()]), table, self.bias).to_local()


class Stage(nn.Module):
    """Consecutive layers of the decoder, with the embedding in front on the first stage and the head on the last."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        *,
        first: bool = True,
        last: bool = True,
        core: Core | None = None,
        expert_rank: int = 0,
        expert_ranks: int = 1,
    ) -> None:
        super().__init__()
        self.spec, self.first, self.last = spec, first, last
        core = core or Core()
        self.rotary = Rotary(spec.mla.qk_rope if spec.mla else spec.head_dim) if spec.position == "rope" else None
        self.embedding = Embedding(spec) if first else None
        learned = first and spec.learned_positions > 0
        self.positions = nn.Embedding(spec.learned_positions, spec.hidden) if learned else None
        self.embedding_norm = Norm(spec.norm, spec.hidden) if first and spec.embedding_norm else None
        kinds = spec.layer_kinds()
        self.layers = nn.ModuleDict(
            {
                str(i): Block(
                    _mixer(spec, kinds[i][0], core, self.rotary),
                    _mlp(spec, kinds[i][1], expert_rank, expert_ranks),
                    spec,
                )
                for i in layers
            }
        )
        self.norm = Norm(spec.norm, spec.hidden) if last and spec.final_norm else None
        self.head = Head(spec, own=not (spec.tied and first)) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, s) on the first stage, else the residual stream (b, s, h) -> the stream, or logits on the last."""
        if self.embedding is not None:
            x = self._embedded(self.embedding, x)
        for block in self.layers.values():
            x = block(x)
        if self.head is None:
            return x
        x = _after(x, self.norm)
        table = self.head.weight
        if table is None and self.embedding is not None:
            table = self.embedding.weight
        return self.head(x, table)

    def _embedded(self, embedding: nn.Module, tokens: Tensor) -> Tensor:
        x = embedding(tokens)
        if self.positions is not None:
            index = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + self.positions(index)
        return _after(x, self.embedding_norm)


def _mixer(spec: ModelSpec, kind: Mixer, core: Core, rotary: Rotary | None) -> nn.Module:
    if kind == "mla" and spec.mla is not None and rotary is not None:
        return LatentAttention(spec, spec.mla, core, rotary)
    return Attention(spec, core, rotary)


def _mlp(spec: ModelSpec, kind: Mlp, expert_rank: int, expert_ranks: int) -> nn.Module:
    if kind == "moe" and spec.moe is not None:
        return Mixture(spec, spec.moe, rank=expert_rank, size=expert_ranks)
    return DenseMlp(spec, spec.ffn)


def named_parameters(stage: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with their names in the whole model."""
    for name, parameter in stage.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def expert_offset(stage: nn.Module, name: str) -> int | None:
    """Index of the first expert of a stacked parameter, or None for a parameter that is not one."""
    owner = stage.get_submodule(name.rpartition(".")[0])
    return owner.first if isinstance(owner, Experts) else None


def local_part(full: Tensor, parameter: Tensor) -> Tensor:
    """The part of ``full`` that this rank holds of ``parameter``: tensor-parallel cut first, data-parallel second."""
    if not isinstance(parameter, DTensor):
        return full
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        dim = getattr(placement, "dim", None)
        if dim is not None and coordinate is not None:
            parts = full.chunk(mesh.size(axis), dim)
            index = coordinate[axis]
            full = parts[index] if index < len(parts) else full.narrow(dim, 0, 0)
    return full


def _values(name: str, shape: tuple[int, ...], seed: int, like: Tensor) -> Tensor:
    """The initial values of the parameter (or expert) ``name``: ones for norms, zeros for biases, else normal."""
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    if len(shape) == 1:
        return torch.ones(shape, dtype=like.dtype, device=like.device)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(like.device).manual_seed(int.from_bytes(digest, "big"))
    values = torch.empty(shape, dtype=like.dtype, device=like.device)
    return values.normal_(0.0, INITIAL_SPREAD, generator=generator)


def full_values(stage: nn.Module, name: str, parameter: Tensor, seed: int) -> Tensor:
    """The initial values of a whole parameter as this rank's expert share has it."""
    like = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    first = expert_offset(stage, name)
    if first is None:
        return _values(name, tuple(parameter.shape), seed, like)
    one = tuple(parameter.shape[1:])
    return torch.stack([_values(f"{name}.{first + i}", one, seed, like) for i in range(parameter.shape[0])])


def initialise(stage: nn.Module, seed: int) -> None:
    """Set all parameters of a stage; the same name gives the same values in every split of the model."""
    with torch.no_grad():
        for name, parameter in named_parameters(stage):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter.numel() <= EXACT_ELEMENTS:
                local.copy_(local_part(full_values(stage, name, parameter, seed), parameter))
            else:
                place = _place(parameter)
                first = expert_offset(stage, name) or 0
                local.copy_(_values(f"{name}@{first}:{place}", tuple(local.shape), seed, local))


def _place(parameter: Tensor) -> str:
    """Which part of a parameter this rank holds, the same text on ranks that hold the same part."""
    if not isinstance(parameter, DTensor):
        return "whole"
    coordinate = parameter.device_mesh.get_coordinate() or ()
    cut = [str(c) for c, p in zip(coordinate, parameter.placements, strict=True) if getattr(p, "dim", None) is not None]
    return ".".join(cut)
