"""The parts of a decoder block, each saving for its backward pass what the cost model counts and no more.

Per layer that is the residual stream in front of each norm, the input of the matrices once, query, key and value, the
attention output with its log-sum-exp, gate and up, and their product.  Shapes: b sequences, s tokens, h hidden, n
heads, d head width, f inner width of the MLP."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from planner.specs.model import MlaSpec, ModelSpec
from planner_validate.trainer.context import Context

NORM_EPSILON = 1e-5
ROTARY_BASE = 10_000.0

_aten = torch.ops.aten
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (functional.silu, lambda grad, x: _aten.silu_backward(grad, x)),
    "gelu": (functional.gelu, lambda grad, x: _aten.gelu_backward(grad, x)),
    "relu": (functional.relu, lambda grad, x: _aten.threshold_backward(grad, x, 0)),
    "relu2": (lambda x: functional.relu(x).square_(), lambda grad, x: 2 * grad * functional.relu(x)),
}
"""Activation and its derivative times an incoming gradient, both from the activation's input."""


class _Marked(threading.local):
    """Whether the matrix product that runs now is one that selective recomputation keeps."""

    now = False


MARKED = _Marked()


def mark(matrix: nn.Module) -> None:
    """Keep the products of a matrix under selective recomputation."""
    matrix.register_forward_pre_hook(lambda *_: setattr(MARKED, "now", True))
    matrix.register_forward_hook(lambda *_: setattr(MARKED, "now", False))


def whole(parameter: Tensor | None, *, partial_gradient: bool) -> Tensor | None:
    """The local tensor of a parameter that all tensor-parallel ranks hold whole.

    Where each rank sees its share of the tokens (``partial_gradient``) its gradient is one addend of the whole."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial() if partial_gradient else Replicate()])


class _RmsNorm(torch.autograd.Function):
    """Root-mean-square normalisation that saves its input and one reciprocal a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.float().square().mean(-1, keepdim=True).add_(NORM_EPSILON).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        normal = (x * scale).to(x.dtype)
        weight_grad = (grad * normal).flatten(0, -2).sum(0)
        inner = grad * weight
        mean = (inner * normal).float().mean(-1, keepdim=True)
        x_grad = (inner - normal.mul_(mean)).mul_(scale)
        return x_grad.to(x.dtype), weight_grad


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis; ``partial_gradient`` is set where a sequence-parallel rank holds part of
    the tokens."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.width, self.partial_gradient = kind, width, False
        self.weight = nn.Parameter(torch.empty(width)) if kind != "layernorm_np" else None
        self.bias = nn.Parameter(torch.empty(width)) if kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)"""
        weight = whole(self.weight, partial_gradient=self.partial_gradient)
        if self.kind == "rmsnorm":
            return (
                functional.rms_norm(x, (self.width,), weight, NORM_EPSILON) if x.is_cuda else _RmsNorm.apply(x, weight)
            )
        return functional.layer_norm(
            x, (self.width,), weight, whole(self.bias, partial_gradient=self.partial_gradient), NORM_EPSILON
        )


class _Rotate(torch.autograd.Function):
    """Rotary position embedding; saves nothing but the shared tables."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (b, s, n, d), tables (s, 1, d/2): each pair (x_i, x_{i+d/2}) turned by its angle."""
    low, high = x.chunk(2, -1)
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    torch.addcmul(low * cos, high, sin, value=-1, out=out[..., :half])
    torch.addcmul(high * cos, low, sin, out=out[..., half:])
    return out


class Rotary:
    """Tables of cosines and sines, made once per length and shared by all layers."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.positions: Tensor | None = None
        """Of this rank's tokens, where it holds only some of a sequence (context parallelism)."""
        self._tables: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """(b, s, n, width) -> the same, rotated by position."""
        key = (x.shape[1], x.dtype, x.device)
        if key not in self._tables:
            inverse = ROTARY_BASE ** (
                torch.arange(0, self.width, 2, device=x.device, dtype=torch.float32) / -self.width
            )
            position = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
            if self.positions is not None:
                position = self.positions.to(x.device, torch.float32)
            angle = torch.outer(position, inverse)[:, None]
            self._tables[key] = (angle.cos().to(x.dtype), angle.sin().to(x.dtype))
        return _Rotate.apply(x, *self._tables[key])


class _PaddedAttention(torch.autograd.Function):
    """Causal attention on a CPU whose values are narrower than its keys.

    The CPU's fused kernel wants equal widths; values are padded for the call and saved without the padding."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        width = v.shape[-1]
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, functional.pad(v, (0, q.shape[-1] - width)), 0.0, True, scale=scale
        )
        out = out[..., :width].transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        width = v.shape[-1]
        wide = (0, q.shape[-1] - width)
        q_grad, k_grad, v_grad = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            functional.pad(grad, wide),
            q,
            k,
            functional.pad(v, wide),
            functional.pad(out, wide),
            lse,
            0.0,
            True,
            scale=ctx.scale,
        )
        return q_grad, k_grad, v_grad[..., :width], None


class Core:
    """Causal attention of whole sequences, or within samples of ``sample`` tokens that are packed into them."""

    def __init__(self, *, fused: bool = True, sample: int | None = None) -> None:
        self.fused, self.sample = fused, sample
        self.context: Context | None = None
        """The ranks that share each sequence (context parallelism)."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (b, s, n, d), k and v (b, s, kv heads, d) -> (b, s, n * d of the values)"""
        rows, tokens = q.shape[:2]
        if self.context is not None:
            return self.context.attend(q, k, v).flatten(2)
        if self.sample is not None:
            q, k, v = (part.reshape(-1, self.sample, *part.shape[2:]) for part in (q, k, v))
        out = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2).reshape(rows, tokens, -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        if not self.fused:
            with sdpa_kernel(SDPBackend.MATH):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if q.device.type == "cpu" and v.shape[-1] != q.shape[-1]:
            return _PaddedAttention.apply(q, k, v, q.shape[-1] ** -0.5)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention; heads are counted from what a rank's matrices give."""

    def __init__(self, spec: ModelSpec, core: Core, rotary: Rotary | None) -> None:
        super().__init__()
        h, q, kv, d = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.head_dim
        self.head_dim, self.core, self.rotary = d, core, rotary
        self.q = nn.Linear(h, q, bias=spec.bias.qkv)
        self.k = nn.Linear(h, kv, bias=spec.bias.qkv)
        self.v = nn.Linear(h, kv, bias=spec.bias.qkv)
        self.out = nn.Linear(q, h, bias=spec.bias.out)
        self.norm_whole = spec.qk_norm == "full"
        kind = "none" if spec.qk_norm == "none" else "rmsnorm"
        self.q_norm = None if kind == "none" else Norm(kind, q if self.norm_whole else d)
        self.k_norm = None if kind == "none" else Norm(kind, kv if self.norm_whole else d)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)"""
        q = self._placed(self.q(x), self.q_norm)
        k = self._placed(self.k(x), self.k_norm)
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        return self.out(self.core(q, k, v))

    def _placed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Heads apart, normalised where the model does that, rotated by position."""
        if norm is not None and self.norm_whole:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None and not self.norm_whole:
            x = norm(x)
        return x if self.rotary is None else self.rotary(x)


def _whole_product(x: Tensor, matrix: nn.Linear) -> Tensor:
    """``x`` times a matrix that all tensor-parallel ranks hold whole."""
    return functional.linear(x, whole(matrix.weight, partial_gradient=False))


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434): keys and values are re-created from one narrow latent."""

    def __init__(self, spec: ModelSpec, mla: MlaSpec, core: Core, rotary: Rotary) -> None:
        super().__init__()
        h, n, qk = spec.hidden, spec.heads, mla.qk_nope + mla.qk_rope
        self.mla, self.core, self.rotary = mla, core, rotary
        self.q_down = nn.Linear(h, mla.q_lora, bias=False) if mla.q_lora else None
        self.q_norm = Norm("rmsnorm", mla.q_lora) if mla.q_lora else None
        self.q_up = nn.Linear(mla.q_lora or h, n * qk, bias=False)
        self.kv_down = nn.Linear(h, mla.kv_lora + mla.qk_rope, bias=False)
        self.kv_norm = Norm("rmsnorm", mla.kv_lora)
        self.kv_up = nn.Linear(mla.kv_lora, n * (mla.qk_nope + mla.v_head), bias=False)
        self.out = nn.Linear(n * mla.v_head, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)"""
        mla, mesh = self.mla, x.device_mesh if isinstance(x, DTensor) else None
        # Every tensor-parallel rank computes the whole latents, and the heads that it holds from them.
        x = x.to_local() if isinstance(x, DTensor) else x
        latent = x
        if self.q_down is not None and self.q_norm is not None:
            latent = self.q_norm(_whole_product(x, self.q_down))
        q = self.q_up(latent).unflatten(-1, (-1, mla.qk_nope + mla.qk_rope))
        plain, turned = q.split([mla.qk_nope, mla.qk_rope], -1)
        q = torch.cat([plain, self.rotary(turned)], -1)
        compressed, shared = _whole_product(x, self.kv_down).split([mla.kv_lora, mla.qk_rope], -1)
        if mesh is not None:
            # The heads of other ranks use the rotary key as well: its gradient is their sum.
            shared = DTensor.from_local(shared, mesh, [Replicate()], run_check=False)
            shared = shared.to_local(grad_placements=[Partial()])
        kv = self.kv_up(self.kv_norm(compressed)).unflatten(-1, (-1, mla.qk_nope + mla.v_head))
        key, v = kv.split([mla.qk_nope, mla.v_head], -1)
        # One rotary key serves all heads.
        shared = self.rotary(shared.unsqueeze(2)).expand(-1, -1, key.shape[2], -1)
        # A copy of the values lets go of the joint tensor, whose keys are saved joined with the rotary ones.
        return self.out(self.core(q, torch.cat([key, shared], -1), v.contiguous()))


class _Gated(torch.autograd.Function):
    """act(gate) * up * probability, saving the factors only; ``probability`` (rows, 1) belongs to routed tokens."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, probability: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up, probability)
        ctx.activation = activation
        product = _ACTIVATIONS[activation][0](gate).mul_(up)
        return product if probability is None else product.mul_(probability)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        gate, up, probability = ctx.saved_tensors
        forward, backward = _ACTIVATIONS[ctx.activation]
        active = forward(gate)
        share = None
        if probability is not None:
            share = (grad * active * up).sum(-1, keepdim=True).to(probability.dtype)
            grad = (grad * probability).to(gate.dtype)
        up_grad = active.mul_(grad)
        return backward(grad * up, gate), up_grad, share, None


class _Active(torch.autograd.Function):
    """act(up) * probability of an MLP without gate, saving the factors only."""

    @staticmethod
    def forward(ctx: Any, up: Tensor, probability: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(up, probability)
        ctx.activation = activation
        product = _ACTIVATIONS[activation][0](up)
        return product if probability is None else product.mul_(probability)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        up, probability = ctx.saved_tensors
        forward, backward = _ACTIVATIONS[ctx.activation]
        share = None
        if probability is not None:
            share = (grad * forward(up)).sum(-1, keepdim=True).to(probability.dtype)
            grad = (grad * probability).to(up.dtype)
        return backward(grad, up), share, None


def activated(gate: Tensor | None, up: Tensor, activation: str, probability: Tensor | None = None) -> Tensor:
    """The input of the down matrix, (..., f)."""
    if gate is None:
        return _Active.apply(up, probability, activation)
    return _Gated.apply(gate, up, probability, activation)


class Mlp(nn.Module):
    """Gated (three matrices) or plain (two) MLP of inner width ``ffn``."""

    def __init__(self, spec: ModelSpec, ffn: int) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gate = nn.Linear(spec.hidden, ffn, bias=spec.bias.mlp) if spec.gated_mlp else None
        self.up = nn.Linear(spec.hidden, ffn, bias=spec.bias.mlp)
        self.down = nn.Linear(ffn, spec.hidden, bias=spec.bias.mlp)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)"""
        gate = None if self.gate is None else self.gate(x)
        return self.down(activated(gate, self.up(x), self.activation))
