"""Context parallelism: each rank holds two chunks of every sequence and attends to keys gathered from all ranks.

Rank r of c holds chunks r and 2c - 1 - r of 2c, so that causal attention is the same work on every rank.  Keys and
values are gathered in front of the attention and their gradients scattered behind it; both stay whole until the
backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

# torch 2.13 renamed both.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def chunk_numbers(rank: int, size: int) -> tuple[int, int]:
    """The two chunks, of 2 * ``size``, that a rank holds."""
    return rank, 2 * size - 1 - rank


def positions(tokens: int, rank: int, size: int) -> Tensor:
    """(tokens / size,) positions of a rank's tokens in sequences of ``tokens``."""
    if size == 1:
        return torch.arange(tokens, device="cpu")
    length = tokens // (2 * size)
    parts = [torch.arange(n * length, (n + 1) * length, device="cpu") for n in chunk_numbers(rank, size)]
    return torch.cat(parts)


@dataclass(frozen=True)
class Context:
    """The ranks that share one sequence, and this one's place among them."""

    group: Any
    rank: int
    size: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries of this rank (b, s / size, n, d) against the keys and values of the whole sequence -> the same
        shape."""
        k, v = _Gather.apply(k, self), _Gather.apply(v, self)
        length = q.shape[1] // 2
        parts = []
        for number, part in zip(chunk_numbers(self.rank, self.size), q.split(length, 1), strict=True):
            seen = (number + 1) * length
            parts.append(_causal(part, k[:, :seen], v[:, :seen]))
        return torch.cat(parts, 1)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last positions (b, l, n, d) among the keys (b, m, kv heads, d)."""
    mask: Any
    if q.is_cuda:
        # It holds two numbers in the place of a matrix, and cannot be made while operations are watched.
        with _disable_current_modes():
            mask = causal_lower_right(q.shape[1], k.shape[1])
    else:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril_(k.shape[1] - q.shape[1])
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


class _Gather(torch.autograd.Function):
    """The tokens of all ranks in their order in the sequence: (b, s / size, n, d) -> (b, s, n, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context, size = context, context.size
        gathered = x.new_empty((size, *x.shape))
        _all_gather(gathered.flatten(0, 1), x.contiguous(), group=context.group)
        halves = gathered.unflatten(2, (2, -1))  # (size, b, 2, chunk, n, d)
        ordered = torch.cat([halves[:, :, 0], halves[:, :, 1].flip(0)])  # (2 size, b, chunk, n, d)
        return ordered.transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        size = ctx.context.size
        ordered = grad.unflatten(1, (2 * size, -1)).transpose(0, 1)
        halves = torch.stack([ordered[:size], ordered[size:].flip(0)], 2)  # (size, b, 2, chunk, n, d)
        own = grad.new_empty(halves.shape[1:])
        _reduce_scatter(own, halves.flatten(0, 1), group=ctx.context.group)
        return own.flatten(1, 2), None
