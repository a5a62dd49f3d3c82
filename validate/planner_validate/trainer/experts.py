"""A mixture of experts whose routed experts are spread over a group of ranks, with tokens sent to them and back.

Routing is forced balanced: experts are dealt to tokens in turn, so that every expert gets the same number of them (one
more or less where the numbers do not divide), as plans assume.  The router is computed all the same and its
probabilities weigh the experts, so it costs what it costs in training and gets its gradients; what it would choose is
not followed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from planner.specs.model import ModelSpec, MoeSpec
from planner_validate.trainer.layers import MARKED, Mlp, activated, whole

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Routes:
    """Where the slots of one rank go; a slot is one of the top_k copies of one token."""

    experts: Indices
    """(rows * tokens, top_k) expert of each slot."""
    order: Indices
    """Slots sorted by expert."""
    sent: tuple[int, ...]
    """Slots for each rank of the expert group."""
    received: tuple[int, ...]
    """Slots from each rank of the expert group."""
    grouping: Indices
    """Received slots sorted by local expert."""
    sizes: tuple[int, ...]
    """Slots of each local expert."""


def dealt(moe: MoeSpec, rows: int, tokens: int, offset: int) -> Indices:
    """(rows * tokens, top_k) experts of tokens ``offset``, ``offset`` + 1, ... of each row: slot i of a sequence gets
    expert i modulo the number of experts, wherever the sequence is cut."""
    slots = (offset + np.arange(tokens, dtype=np.int64))[:, None] * moe.top_k + np.arange(moe.top_k)
    return np.tile(slots % moe.experts, (rows, 1))


@lru_cache(maxsize=64)
def routes(moe: MoeSpec, rows: int, tokens: int, offsets: tuple[int, ...], rank: int) -> Routes:
    """Routes of the rank ``rank`` of an expert group whose ranks hold tokens from ``offsets`` on."""
    size = len(offsets)
    local = moe.experts // size
    counts = np.stack(
        [np.bincount(dealt(moe, rows, tokens, at).reshape(-1), minlength=moe.experts) for at in offsets]
    ).reshape(size, size, local)  # (source, destination, local expert)
    mine = dealt(moe, rows, tokens, offsets[rank])
    arrived = counts[:, rank]  # (source, local expert), the order in which slots arrive
    labels = np.repeat(np.tile(np.arange(local), size), arrived.reshape(-1))
    return Routes(
        experts=mine,
        order=np.argsort(mine.reshape(-1), kind="stable"),
        sent=tuple(int(n) for n in counts[rank].sum(-1)),
        received=tuple(int(n) for n in arrived.sum(-1)),
        grouping=np.argsort(labels, kind="stable"),
        sizes=tuple(int(n) for n in arrived.sum(0)),
    )


class _Exchange(torch.autograd.Function):
    """Rows to their ranks; the gradients travel back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(x: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: Any) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out


class _Grouped(torch.autograd.Function):
    """Consecutive groups of rows, each times the matrix of its expert: x (rows, i), weight (experts, o, i)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        return _grouped(x, weight.transpose(1, 2), sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        weight_grad = torch.empty_like(weight)
        if len(set(ctx.sizes)) == 1:
            shape = (len(ctx.sizes), ctx.sizes[0], -1)
            torch.bmm(grad.view(shape).transpose(1, 2), x.view(shape), out=weight_grad)
        else:
            parts = zip(grad.split(ctx.sizes), x.split(ctx.sizes), weight_grad, strict=True)
            for grad_part, x_part, out in parts:
                torch.mm(grad_part.t(), x_part, out=out)
        return _grouped(grad, weight, ctx.sizes), weight_grad, None


def _grouped(x: Tensor, matrices: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """x (rows, i) times matrices (experts, i, o), group by group; one batched product where groups are equal."""
    if len(set(sizes)) == 1:
        return torch.bmm(x.view(len(sizes), sizes[0], -1), matrices).flatten(0, 1)
    out = x.new_empty((x.shape[0], matrices.shape[2]))
    for part, matrix, result in zip(x.split(sizes), matrices, out.split(sizes), strict=True):
        torch.mm(part, matrix, out=result)
    return out


class Experts(nn.Module):
    """The routed experts of one rank, matrix by matrix stacked along their first axis."""

    def __init__(self, spec: ModelSpec, moe: MoeSpec, first: int, number: int) -> None:
        super().__init__()
        h, f = spec.hidden, moe.expert_ffn
        self.first, self.activation = first, spec.activation
        self.keeps_first = False
        """The product of the first matrix stays under selective recomputation."""
        self.gate = nn.Parameter(torch.empty(number, f, h)) if spec.gated_mlp else None
        self.up = nn.Parameter(torch.empty(number, f, h))
        self.down = nn.Parameter(torch.empty(number, h, f))

    def forward(self, x: Tensor, probability: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """x (rows, h) in the order of the experts, probability (rows, 1) -> (rows, h)"""
        MARKED.now = self.keeps_first
        first = _Grouped.apply(x, self.up if self.gate is None else self.gate, sizes)
        MARKED.now = False
        gate, up = (None, first) if self.gate is None else (first, _Grouped.apply(x, self.up, sizes))
        return _Grouped.apply(activated(gate, up, self.activation, probability), self.down, sizes)


class Router(nn.Module):
    """Probability of every expert for every token, in fp32."""

    def __init__(self, spec: ModelSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.partial_gradient = False
        self.weight = nn.Parameter(torch.empty(moe.experts, spec.hidden))
        self.bias = nn.Parameter(torch.empty(moe.experts)) if moe.router_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, h) -> (tokens, experts)"""
        weight = whole(self.weight, partial_gradient=self.partial_gradient)
        bias = whole(self.bias, partial_gradient=self.partial_gradient)
        return functional.linear(x, weight, bias).float().softmax(-1)


class Mixture(nn.Module):
    """Router, routed experts of this rank's share, and shared experts."""

    def __init__(self, spec: ModelSpec, moe: MoeSpec, *, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        local = moe.experts // size
        self.moe, self.rank = moe, rank
        self.group: Any = None
        """Process group of the experts; None where one rank holds them all."""
        self.offsets: tuple[int, ...] = (0,) * size
        """Position of the first token of every rank of the group."""
        self.router = Router(spec, moe)
        self.experts = Experts(spec, moe, rank * local, local)
        self.shared = Mlp(spec, moe.shared_ffn) if moe.shared_ffn else None
        self.shared_gate = nn.Parameter(torch.empty(1, spec.hidden)) if moe.shared_gate else None
        self.partial_gradient = False

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)"""
        route = routes(self.moe, x.shape[0], x.shape[1], self.offsets, self.rank)
        flat = x.flatten(0, 1)
        chosen = torch.from_numpy(route.experts).to(x.device)
        weight = self.router(flat).gather(1, chosen)
        weight = weight / weight.sum(-1, keepdim=True)
        order = torch.from_numpy(route.order).to(x.device)
        back = torch.from_numpy(np.argsort(route.order)).to(x.device)
        slots = flat.index_select(0, order // self.moe.top_k)
        slots = self._at_experts(slots, weight.reshape(-1, 1).index_select(0, order), route)
        out = slots.index_select(0, back).view(-1, self.moe.top_k, flat.shape[1]).sum(1).view_as(x)
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = (
                shared * functional.linear(x, whole(self.shared_gate, partial_gradient=self.partial_gradient)).sigmoid()
            )
        return out + shared

    def _at_experts(self, slots: Tensor, weight: Tensor, route: Routes) -> Tensor:
        """Slots (n, h) with their weights (n, 1) in the order of all experts -> their outputs in the same order."""
        if self.group is None:
            return self.experts(slots, weight, route.sizes)
        grouping = torch.from_numpy(route.grouping).to(slots.device)
        back = torch.from_numpy(np.argsort(route.grouping)).to(slots.device)
        slots = _Exchange.apply(slots, route.sent, route.received, self.group).index_select(0, grouping)
        weight = _Exchange.apply(weight, route.sent, route.received, self.group).index_select(0, grouping)
        out = self.experts(slots, weight, route.sizes).index_select(0, back)
        return _Exchange.apply(out, route.received, route.sent, self.group)
