"""Time of one layer and one micro-batch on one rank, forward and backward, as named terms.

Each term is a pair of (N,) arrays; ``layer_time`` is the only place where a layer's work is listed, so search,
estimate and the time tree cannot disagree about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from planner.backends.base import RecomputeKind
from planner.cost import traffic
from planner.cost.attention import attention_s
from planner.cost.collectives import SECONDS, SENT_BYTES, Measure
from planner.cost.context import Work
from planner.cost.gemm import adapter_s, grouped_linear_s, linear_s
from planner.cost.groups import Groups
from planner.cost.params import LayerKind, Matrix, head_widths, layer_matrices
from planner.cost.weights import layer_weights
from planner.specs.batch import BoolArray, FloatArray

_ROTARY_KERNELS_PER_SAMPLE = 60
"""Queries and keys of one sample: slices, cosine, sine, casts, rotated half, products and sums, about 15 each forward
and as many backward (Megatron-LM, rope_utils.py before its loop over samples was replaced)."""
_MIXERS_OF_MANY_KERNELS = ("mamba", "gdn", "mla")
"""Mixers that launch far more kernels than plain attention: convolution, chunk states and gates of a scan; low-rank
projections, norms, splits and joins of latent attention."""
_KERNELS_PER_ADAPTER = 12
"""Forward two GEMMs, a scaling and a sum; backward twice as many."""


@dataclass(frozen=True)
class Term:
    """Seconds of one kind of work in one layer."""

    name: str
    forward: FloatArray
    backward: FloatArray
    source: str
    communication: bool = False


@dataclass(frozen=True)
class LayerTime:
    """All terms of one layer kind for N candidates."""

    terms: tuple[Term, ...]
    host_floor: FloatArray
    """Time the host needs to issue the layer's kernels, forward and backward; the layer takes at least this."""
    synchronous: bool = False
    """The host runs the kernels itself, so that this time adds to theirs."""

    def forward(self) -> FloatArray:
        return _sum(term.forward for term in self.terms)

    def backward(self) -> FloatArray:
        return _sum(term.backward for term in self.terms)

    def total(self) -> FloatArray:
        return self.issued(self.forward() + self.backward(), self.host_floor)

    def issued(self, kernels: FloatArray, host: FloatArray) -> FloatArray:
        """Seconds of ``kernels`` that take the host ``host`` to issue."""
        return kernels + host if self.synchronous else np.maximum(kernels, host)

    def named(self, name: str) -> Term:
        return next(term for term in self.terms if term.name == name)


def _sum(parts: Iterator[FloatArray]) -> FloatArray:
    total = next(parts).copy()
    for part in parts:
        total += part
    return total


def layer_time(work: Work, groups: Groups, kind: LayerKind) -> LayerTime:
    """Terms of one layer of ``kind``."""
    terms = [
        *_matrix_terms(work, kind),
        *_adapter_terms(work, kind),
        *_other_terms(work, kind),
        *_software_terms(work, groups, kind),
        *_communication_terms(work, groups, kind),
    ]
    synchronous = work.context.cluster.accelerator.synchronous
    return LayerTime(tuple(terms), _host_floor(work, groups, kind), synchronous)


def _fused(model_matrices: tuple[Matrix, ...]) -> Iterator[tuple[Matrix, int]]:
    """Matrices with the same input run as one multiplication (q, k, v; gate and up): (first of them, joint
    outputs)."""
    for _, same in groupby(model_matrices, key=lambda m: (m.part, m.inputs, m.split)):
        matrices = list(same)
        if matrices[0].split == "column":
            yield matrices[0], sum(m.outputs for m in matrices)
        else:
            yield from ((m, m.outputs) for m in matrices)


def _matrix_terms(work: Work, kind: LayerKind) -> list[Term]:
    """Matrix multiplications, by the part of the layer they belong to."""
    context = work.context
    constants, rate, stream = context.constants, context.layer_flops_per_s, context.stream_bytes_per_s
    frozen = context.job.frozen
    times: dict[str, tuple[FloatArray, FloatArray]] = {}
    for matrix, outputs in _fused(layer_matrices(context.model, kind)):
        degree = work.etp if matrix.part == "expert" else work.tp
        inputs_local = matrix.inputs / degree if matrix.split == "row" else matrix.inputs
        outputs_local = outputs / degree if matrix.split == "column" else outputs
        if matrix.part == "expert":
            moe = context.model.moe
            local = np.maximum((moe.experts if moe else 1) / work.batch.ep, 1.0)
            pair = grouped_linear_s(
                constants, rate, stream, work.routed_rows, local, inputs_local, outputs_local, frozen=frozen
            )
        else:
            tokens = work.sp_tokens if matrix.split == "none" else work.tokens
            pair = linear_s(constants, rate, stream, tokens, inputs_local, outputs_local, frozen=frozen)
        name = _TERM_OF_PART[matrix.part]
        old = times.get(name, (work.zeros(), work.zeros()))
        times[name] = (old[0] + pair[0], old[1] + pair[1])
    return [Term(name, pair[0], pair[1], "2 (M + a)(K + b)(N + a) / rate") for name, pair in times.items()]


def _adapter_terms(work: Work, kind: LayerKind) -> list[Term]:
    """Low-rank adapters of a lora job: two thin 16-bit matrices beside a frozen one, their product added to its output.

    All local experts of a grouped matrix share one adapter, as Megatron-Bridge has it."""
    context = work.context
    if not context.job.frozen:
        return []
    rate, stream = context.dense_flops_per_s * context.constants.gemm_share, context.stream_bytes_per_s
    rank = float(context.job.lora_rank)
    forward, backward = work.zeros(), work.zeros()
    for matrix, outputs in _fused(layer_matrices(context.model, kind)):
        if not matrix.adapted(context.job.lora_targets):
            continue
        degree = work.etp if matrix.part == "expert" else work.tp
        rows = work.routed_rows if matrix.part == "expert" else work.tokens
        inner = matrix.inputs / degree if matrix.split == "row" else matrix.inputs
        outer = outputs / degree if matrix.split == "column" else outputs
        pair = adapter_s(rate, stream, rows, inner, rank, outer)
        forward, backward = forward + pair[0], backward + pair[1]
    return [Term("adapters", forward, backward, "two rank-r GEMMs per matrix, bytes over memory bandwidth")]


_TERM_OF_PART = {
    "attention": "attention projections",
    "mixer": "mixer projections",
    "mlp": "mlp matrices",
    "shared": "mlp matrices",
    "expert": "expert matrices",
    "router": "router",
    "latent": "router",
}


def _other_terms(work: Work, kind: LayerKind) -> list[Term]:
    """Core attention and elementwise kernels."""
    core_forward, core_backward = attention_s(work, kind)
    elementwise = [
        ("norms", traffic.norms_s(work)),
        ("rotary", traffic.stream_s(work, traffic.rotary_bytes(work, kind))),
        ("activation function", traffic.stream_s(work, traffic.activation_bytes(work, kind))),
        ("expert permutation", traffic.stream_s(work, traffic.routing_bytes(work, kind))),
        ("fp8 casts", traffic.stream_s(work, traffic.cast_bytes(work, kind), fused=True)),
    ]
    terms = [
        Term(
            "core attention",
            core_forward,
            core_backward,
            "causal FLOPs over the kernel's rate at this length and occupancy",
        )
    ]
    mixer = traffic.mixer_bytes(work, kind) / work.context.stream_bytes_per_s
    for name, seconds in [("mixer elementwise", mixer), *elementwise]:
        if np.any(seconds):
            terms.append(
                Term(
                    name, seconds, 2.0 * seconds, "bytes over sustained memory bandwidth; backward moves twice as many"
                )
            )
    return terms


def _software_terms(work: Work, groups: Groups, kind: LayerKind) -> list[Term]:
    """What some stacks do beside the mathematics of a layer."""
    constants, habits = work.context.constants, work.context.backend.habits
    terms = []
    if habits.gradient_add_bytes > 0.0:
        weights = layer_weights(work, kind)
        added = traffic.gradient_add_s(work, weights.dense + weights.expert)
        terms.append(
            Term("gradient accumulation", work.zeros(), added, "bytes per parameter over sustained memory bandwidth")
        )
    if habits.blocking_launches:
        gap = np.full(len(work.batch), habits.kernels_per_layer * constants.blocking_launch_s)
        terms.append(Term("launch gaps", gap / 3.0, 2.0 * gap / 3.0, "kernels x idle time between two of them"))
    if kind[1] == "moe" and not (habits.padded_experts or habits.expert_overlap):
        waits = np.where(_flexible(work, groups), 0.0, constants.routing_wait_share)
        wait = waits * _routed_host_s(work, kind)
        if np.any(wait):
            terms.append(Term("routing waits", wait / 3.0, 2.0 * wait / 3.0, "share of the launches behind a wait"))
    return terms


def _communication_terms(work: Work, groups: Groups, kind: LayerKind) -> list[Term]:
    terms = [
        _tensor_parallel(work, groups, kind),
        _context_parallel(work, groups, kind),
        _expert_parallel(work, groups, kind),
    ]
    return [term for term in terms if np.any(term.forward)]


def _tensor_parallel(work: Work, groups: Groups, kind: LayerKind) -> Term:
    """Two collectives (gather and scatter, or one all-reduce) around the mixer and around the MLP, each way."""
    pair, expert = tensor_exchanges(work, groups, kind, SECONDS)
    waits = 2.0 * _ring_wait_s(work, groups)
    exposed = _split_blocks(work, kind) * (pair + waits) * (1.0 - work.tensor_overlap) + expert
    return Term(
        "tensor-parallel traffic",
        exposed,
        exposed.copy(),
        "2 (n-1)/n S / B(S) per block and direction",
        communication=True,
    )


def tensor_parallel_bytes(work: Work, groups: Groups, kind: LayerKind) -> FloatArray:
    """What one rank sends for one layer, each way."""
    pair, expert = tensor_exchanges(work, groups, kind, SENT_BYTES)
    return np.asarray(_split_blocks(work, kind) * pair + expert)


def tensor_exchanges(work: Work, groups: Groups, kind: LayerKind, measure: Measure) -> tuple[FloatArray, FloatArray]:
    """(one block of a layer, all its experts), each way."""
    context = work.context
    full = work.tokens * context.model.hidden * context.activation_bytes
    # Gathered inputs travel as the matrices read them, in 8 or 4 bits where those are narrow; scattered sums do not.
    gathered = measure.all_gather(groups.tensor, context.job.narrow_share * full)
    gathered = gathered + measure.all_gather(groups.tensor, full)
    pair = np.where(work.batch.sequence_parallel, gathered, measure.all_reduce(groups.tensor, full))
    if kind[1] != "moe" or context.model.moe is None:
        return pair, work.zeros()
    rows = work.routed_rows * (context.model.moe.latent or context.model.hidden) * context.activation_bytes
    return pair, 2.0 * measure.all_gather(groups.expert_tensor, rows)


def _split_blocks(work: Work, kind: LayerKind) -> float:
    """Blocks of a layer that are split over the tp ranks."""
    return float(kind[0] != "none") + _sharded_mlp_blocks(work, kind)


def _sharded_mlp_blocks(work: Work, kind: LayerKind) -> float:
    """MLP blocks whose input is gathered over the tp ranks: dense ones and shared experts; routed experts keep split
    tokens."""
    if kind[1] == "dense":
        return 1.0
    moe = work.context.model.moe
    return 1.0 if kind[1] == "moe" and moe is not None and moe.shared_ffn else 0.0


def _context_parallel(work: Work, groups: Groups, kind: LayerKind) -> Term:
    """Keys and values (ring, all-gather) or queries, keys, values and outputs (all-to-all) of one layer."""
    forward, backward = context_exchanges(work, groups, kind, SECONDS)
    source = _CONTEXT_SOURCES[work.context.backend.habits.context_parallel_comm]
    if work.context.backend.habits.context_parallel_comm == "ring" and np.any(forward):
        # Each of the c - 1 exchanges hides behind the attention on the chunk in hand.
        core, slow = attention_s(work, kind), work.context.constants.overlap_slowdown
        forward = np.maximum(forward - core[0], 0.0) + slow * np.minimum(forward, core[0])
        backward = np.maximum(backward - core[1], 0.0) + slow * np.minimum(backward, core[1])
    return Term("context-parallel traffic", forward, backward, source, communication=True)


_CONTEXT_SOURCES = {
    "all-to-all": "(c-1)/c of q, k, v and output / B",
    "ring": "(c-1) KV chunks / B behind attention",
    "all-gather": "all-gather of KV forward, gather and scatter backward",
}


def context_exchanges(work: Work, groups: Groups, kind: LayerKind, measure: Measure) -> tuple[FloatArray, FloatArray]:
    """One layer (forward, backward), before any of it hides."""
    context = work.context
    model = context.model
    if kind[0] not in ("attention", "window", "mla") or not np.any(work.cp > 1):
        return work.zeros(), work.zeros()
    # A key and a value of one head, as wide together as a query and an output; latent attention has all heads' keys.
    pair = context.activation_bytes * sum(head_widths(model))
    kv = pair * np.maximum((model.kv_heads if model.mla is None else model.heads) / work.tp, 1.0)
    if context.backend.habits.context_parallel_comm == "all-to-all":
        q = pair * model.heads / work.tp
        exchange = measure.all_to_all(groups.context, work.tokens * (q + kv))
        return exchange, exchange
    moved = measure.all_gather(groups.context, kv * work.tokens * work.cp)
    return moved, 2.0 * moved


def _expert_parallel(work: Work, groups: Groups, kind: LayerKind) -> Term:
    """Dispatch and combine, each way."""
    habits = work.context.backend.habits
    shown = 1.0 - work.context.constants.expert_overlap_share if habits.expert_overlap else 1.0
    both = shown * expert_exchanges(work, groups, kind, SECONDS)
    return Term(
        "expert-parallel traffic", both, both.copy(), "dispatch and combine of K copies, each way", communication=True
    )


def expert_exchanges(work: Work, groups: Groups, kind: LayerKind, measure: Measure) -> FloatArray:
    """Dispatch and combine of one layer, each way: top_k copies of every token's hidden vector, or fewer where several
    of its experts share a rank and the dispatcher knows it."""
    context = work.context
    moe = context.model.moe
    if kind[1] != "moe" or moe is None:
        return work.zeros()
    token = work.busiest_share * work.sp_tokens * (moe.latent or context.model.hidden) * context.activation_bytes
    plain = measure.all_to_all(groups.expert, moe.top_k * token)
    flex = measure.dispatch(groups.expert, token, moe.top_k)
    return np.asarray(2.0 * np.where(_flexible(work, groups), flex, plain))


def _flexible(work: Work, groups: Groups) -> BoolArray:
    """(N,) where one copy of a token goes to each domain, by kernels that exchange the token counts themselves."""
    habit, backend = work.context.backend.habits.expert_dispatch, work.context.backend
    if habit == "flex-between-domains":
        return np.asarray((groups.expert.crosses > 0) & backend.flexible_dispatch(work.context.cluster))
    return np.full(len(work.batch), habit == "flex")


def _host_floor(work: Work, groups: Groups, kind: LayerKind) -> FloatArray:
    """Launch-bound time of one layer; what CUDA graphs replay costs the host nothing.

    Collectives can hold up the host on the way, as can rings over the network."""
    constants, habits = work.context.constants, work.context.backend.habits
    kernels = np.full(len(work.batch), float(habits.kernels_per_layer if habits.cuda_graphs == "none" else 0))
    split, sharded = constants.tensor_parallel_launch_factor, constants.sharding_launch_factor
    kernels = kernels + np.where(work.tp > 1, split * habits.tensor_parallel_kernels, 0.0)
    kernels = kernels + np.where(work.batch.zero_stage >= 2, sharded * habits.sharding_kernels, 0.0)
    job = work.context.job
    if job.frozen:
        adapters = sum(matrix.adapted(job.lora_targets) for matrix in layer_matrices(work.context.model, kind))
        kernels = kernels + _KERNELS_PER_ADAPTER * adapters
    floor = kernels * constants.launch_s
    if job.sample_tokens is not None and habits.rotary_sample_by_sample and kind[0] in ("attention", "window", "mla"):
        samples = np.ceil(job.seq_len / job.sample_tokens) * work.batch.micro_batch
        floor = floor + _ROTARY_KERNELS_PER_SAMPLE * samples * constants.launch_s
    floor = floor + _routed_host_s(work, kind)
    held_up = np.where((work.tp > 1) & (groups.pipeline.crosses > 0), work.tp * constants.staged_collective_host_s, 0.0)
    return np.asarray(floor + held_up + 8.0 * _ring_wait_s(work, groups))


def _routed_host_s(work: Work, kind: LayerKind) -> FloatArray:
    """Host time of one layer of a mixture beyond that of a dense one, (N,): routing, dispatch and expert kernels, and
    mixers of many small kernels (scans, latent attention).

    Partial graphs capture mixers and router; shared and routed experts stay outside.  Tensor-parallel exchanges and the
    overlap of expert traffic both break a layer into pieces that streams hand over; the larger of the two counts."""
    constants, habits = work.context.constants, work.context.backend.habits
    moe, graphs = work.context.model.moe, habits.cuda_graphs
    if moe is None or graphs == "full":
        return work.zeros()
    counted = constants.moe_host_s * (constants.padded_expert_host_share if habits.padded_experts else 1.0)
    exchange = np.where(work.batch.tp > 1, constants.tensor_parallel_host_factor, 0.0)
    shared = float(kind[1] == "moe" and moe.shared_ffn > 0)
    launches = 0.0
    if kind[1] == "moe":
        launches += 1.0 + (constants.narrow_expert_host_factor if work.context.job.narrow else 0.0)
    if graphs == "partial":
        return np.asarray(counted * constants.partial_graph_host_share * (launches + shared * exchange))
    pieces = (shared + float(kind[0] != "none")) * exchange
    if kind[1] == "moe" and habits.expert_overlap:
        pieces = np.maximum(pieces, constants.expert_overlap_host_factor)
    many = constants.mixer_host_share if kind[0] in _MIXERS_OF_MANY_KERNELS else 0.0
    return np.asarray(counted * (launches + many + pieces))


def _ring_wait_s(work: Work, groups: Groups) -> FloatArray:
    """What a tensor-parallel ring over the network takes beyond its bytes, where that was measured: nothing else
    travels while a block waits."""
    if work.context.cluster.ring_step_s is None:
        return work.zeros()
    return np.asarray(groups.tensor.crosses * groups.tensor.latency_s)


def recompute_s(work: Work, kind: LayerKind, layer: LayerTime, choice: RecomputeKind) -> FloatArray:
    """Forward work that one recomputed layer repeats in the backward pass."""
    exchanged = frozenset(term.name for term in layer.terms if term.communication)
    return repeated(work, kind, {term.name: term.forward for term in layer.terms}, exchanged, choice)


def repeated(
    work: Work, kind: LayerKind, names: Mapping[str, FloatArray], exchanged: Set[str], choice: RecomputeKind
) -> FloatArray:
    """Of the forward pass's terms by ``names`` (``exchanged`` ones are communication), what one recomputed layer
    repeats."""
    zero = work.zeros()
    if "layer" in choice.repeats:
        return sum((value for name, value in names.items() if choice.regathers or name not in exchanged), zero)
    norms = names.get("norms", zero)
    # The plain matrices of a mixture's MLP block are its shared experts.
    blocks = names.get("mlp matrices", zero) + names.get("activation function", zero)
    parts = {
        "attention_core": names.get("core attention", zero),
        "norms": norms / 2.0,  # the residual add is not repeated
        "activation": names.get("activation function", zero),
        "mlp": blocks if kind[1] == "dense" else zero,
        "expert_activation": names.get("activation function", zero) if kind[1] == "moe" else zero,
        "shared_experts": names.get("mlp matrices", zero) if kind[1] == "moe" else zero,
        "qkv_up": names.get("attention projections", zero) * _up_share(work, kind) if kind[0] == "mla" else zero,
        "half_matmuls": 0.5
        * (
            names.get("mlp matrices", zero)
            + names.get("attention projections", zero)
            + names.get("expert matrices", zero)
        )
        + norms,
        "moe": names.get("expert matrices", zero)
        + names.get("expert permutation", zero)
        + names.get("expert-parallel traffic", zero)
        + names.get("router", zero)
        + blocks
        if kind[1] == "moe"
        else zero,
    }
    total = zero
    for name in sorted(choice.repeats):
        total = total + parts[name]
    if choice.regathers and "mlp" in choice.repeats and kind[1] == "dense":
        total = total + names.get("tensor-parallel traffic", zero) / 2.0
    return total


def _up_share(work: Work, kind: LayerKind) -> float:
    """Share of the attention projections that re-creates queries, keys and values from their latents."""
    matrices = [m for m in layer_matrices(work.context.model, kind) if m.part == "attention"]
    up = sum(m.size for m in matrices if m.name in ("q_up", "kv_up"))
    return up / sum(m.size for m in matrices)
