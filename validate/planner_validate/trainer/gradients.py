"""Gradients of a tiny copy of the model under the plan, compared with the same model on one device.

``shrink`` keeps the plan's degrees and every kind of layer and makes all widths as small as the degrees allow; each
rank computes the reference itself and compares the parts it holds."""

from __future__ import annotations

import math
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from planner.specs.job import Job
from planner.specs.model import MlaSpec, ModelSpec, MoeSpec
from planner.specs.strategy import Strategy
from planner.specs.validation import GradientCheck, RunConfig
from planner_validate.trainer.layers import Core
from planner_validate.trainer.model import Stage, expert_offset, initialise, local_part, named_parameters
from planner_validate.trainer.training import build, synthetic_tokens

HEAD_DIM = 8
SMALLEST_WIDTH = 64
SMALLEST_GRADIENT = 1e-5
"""Share of the model's largest gradient below which a difference is rounding: a bias of the keys, for one, has a
gradient of exactly zero where positions are not rotary."""


def shrink(config: RunConfig) -> RunConfig:
    """The tiny copy: same degrees, same kinds of layers, fp32, few layers, narrow matrices, short sequences."""
    strategy, model = config.strategy, config.model
    counts = _layers(strategy, model)
    tokens = _tokens(strategy)
    sample = config.job.sample_tokens
    packed = sample is not None and sample < strategy.seq_len
    micro = min(strategy.micro_batch, 2)
    accumulate = _micro_batches(strategy)
    recomputed = strategy.recompute.layers_per_stage
    small = strategy.model_copy(
        update={
            "layers_per_stage": counts,
            "micro_batch": micro,
            "grad_accum": accumulate,
            "global_batch": micro * accumulate * strategy.dp,
            "seq_len": tokens,
            "precision": "fp32",
            "recompute": strategy.recompute.model_copy(
                update={
                    "layers_per_stage": None
                    if recomputed is None
                    else tuple(min(r, c) for r, c in zip(recomputed, counts, strict=True))
                }
            ),
        }
    )
    job = Job(
        seq_len=tokens,
        global_batch=small.global_batch,
        sample_tokens=tokens // 2 if packed else None,
        precision="fp32",
        flash_attention=config.job.flash_attention,
    )
    return config.model_copy(update={"model": shrink_model(model, strategy, counts), "strategy": small, "job": job})


def _layers(strategy: Strategy, model: ModelSpec) -> tuple[int, ...]:
    """One layer a virtual stage; without a pipeline as many as show every kind of layer, at most four."""
    stages = strategy.pp * strategy.vpp
    if stages > 1:
        return (1,) * stages
    kinds = model.layer_kinds()
    needed = 1 + max(kinds.index(kind) for kind in set(kinds))
    return (min(max(needed, 2), 4, model.layers),)


def _tokens(strategy: Strategy) -> int:
    """Tokens of a sequence; the chunk of every rank meets the experts in the same order as a whole sequence."""
    return math.lcm(2 * strategy.cp * strategy.tp * strategy.ep, 16)


def _micro_batches(strategy: Strategy) -> int:
    """At least two; with a pipeline enough to fill it and a whole number of rounds."""
    return 2 * strategy.pp if strategy.pp > 1 else 2


def shrink_model(model: ModelSpec, strategy: Strategy, counts: tuple[int, ...]) -> ModelSpec:
    """Widths that every degree divides, in the proportions of the model where that matters (grouped heads, top-k)."""
    layers, tp = sum(counts), strategy.tp
    grouped = min(model.heads // model.kv_heads, 2)
    kv = (1 if model.kv_heads == 1 else 2) * (tp if model.kv_heads > 1 else 1)
    heads = kv * grouped
    update: dict[str, object] = {
        "layers": layers,
        "hidden": math.lcm(SMALLEST_WIDTH // 2, 2 * tp),
        "ffn": 24 * tp if model.ffn else 0,
        "heads": heads,
        "kv_heads": kv,
        "head_dim": HEAD_DIM,
        "vocab": 48 * tp,
        "pattern": model.pattern[:layers] if model.pattern else None,
        "embedding_width": 0,
        "learned_positions": _tokens(strategy) if model.learned_positions else 0,
        "window": None,
        "max_seq": max(model.max_seq, _tokens(strategy)),
    }
    if model.mla is not None:
        update["mla"] = MlaSpec(q_lora=12 if model.mla.q_lora else 0, kv_lora=16, qk_nope=8, qk_rope=4, v_head=8)
        update |= {"head_dim": 12, "heads": 2 * tp, "kv_heads": 2 * tp}
    if model.moe is not None:
        update["moe"] = _shrink_experts(model.moe, strategy, layers)
        if update["ffn"] == 0:
            update["ffn"] = 24 * tp
    return ModelSpec.model_validate({**model.model_dump(), **_plain(update)})


def _plain(update: dict[str, object]) -> dict[str, object]:
    return {k: v.model_dump() if isinstance(v, MlaSpec | MoeSpec) else v for k, v in update.items()}


def _shrink_experts(moe: MoeSpec, strategy: Strategy, layers: int) -> MoeSpec:
    """Two experts a rank where the model has as many; one dense layer in front where it has dense layers."""
    experts = max(strategy.ep * (2 if moe.experts >= 2 * strategy.ep else 1), 2)
    dense = moe.dense_first > 0 or moe.every > 1
    return moe.model_copy(
        update={
            "experts": experts,
            "top_k": min(moe.top_k, 2, experts),
            "expert_ffn": 16,
            "shared_ffn": 16 * strategy.tp if moe.shared_ffn else 0,
            "dense_first": int(dense and layers > 1),
            "every": 1,
            "offset": 0,
        }
    )


def check_gradients(config: RunConfig) -> GradientCheck:
    """Run the tiny copy of ``config`` under its plan and alone; collective, the same answer on every rank."""
    tiny = shrink(config)
    trainer = build(tiny)
    tokens, targets = trainer.batch(0)
    trainer.forward_backward(tokens, targets)
    squares = trainer.squared_norm()
    dist.all_reduce(squares)
    reference = reference_gradients(tiny, trainer.device)
    floor = SMALLEST_GRADIENT * max(gradient.abs().max().item() for gradient in reference.values())
    worst, name = 0.0, ""
    for stage in trainer.stages.values():
        for own, parameter in named_parameters(stage):
            error = _error(parameter, _reference_of(stage, own, parameter, reference), floor)
            if not error <= worst:
                worst, name = error, own
    found: list[tuple[float, str]] = [(0.0, "")] * dist.get_world_size()
    dist.all_gather_object(found, (worst, name))
    worst, name = max(found, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in reference.values()))
    return GradientCheck(
        parameters=len(reference),
        largest_relative_error=worst if math.isfinite(worst) else 1e30,
        worst_parameter=name,
        gradient_norm=math.sqrt(squares.item()) if math.isfinite(squares.item()) else 1e30,
        reference_norm=norm,
    )


def _reference_of(stage: Stage, name: str, parameter: Tensor, reference: dict[str, Tensor]) -> Tensor:
    """What the gradient of this rank's part should be."""
    full = reference[name]
    first = expert_offset(stage, name)
    if first is not None:
        full = full[first : first + parameter.shape[0]]
    return local_part(full, parameter)


def _error(parameter: Tensor, wanted: Tensor, floor: float) -> float:
    """Largest deviation of a rank's part over the largest element of that part, or over ``floor`` if that is less."""
    gradient = parameter.grad
    if not wanted.numel():
        return 0.0
    if gradient is None:
        return math.inf
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    scale = max(wanted.abs().max().item(), floor)
    return float((local.to(wanted.device) - wanted).abs().max().item() / scale)


def reference_gradients(config: RunConfig, device: torch.device) -> dict[str, Tensor]:
    """Gradients of the whole model on one device over the whole global batch, in one pass."""
    strategy, model = config.strategy, config.model
    sample = config.job.sample_tokens
    stage = Stage(model, range(model.layers), core=Core(fused=config.job.flash_attention, sample=sample)).to(device)
    initialise(stage, config.seed)
    rows = strategy.micro_batch * strategy.grad_accum * strategy.dp
    data = synthetic_tokens(model.vocab, rows, strategy.seq_len, config.seed, 0).to(device)
    functional.cross_entropy(stage(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in named_parameters(stage)}
    missing = Counter(name for name, gradient in gradients.items() if gradient is None)
    if missing:
        raise RuntimeError(f"parameters without a gradient: {sorted(missing)}")
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}
