"""Which small pieces of work are timed on a machine: general shapes that tell the constants of every formula apart, and
those of the model that is to be trained, whole and split over tensor-parallel ranks.

Sizes are bounded by the work that one execution may be, so that a CPU is not given what a GPU does in a blink."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.cost.params import distinct_kinds, head_widths, layer_matrices
from planner.specs.benchmark import COLLECTIVES, Benchmark, BenchmarkKind
from planner.specs.job import Precision
from planner.specs.model import ModelSpec
from planner.specs.validation import RunDevice

_GEMMS: tuple[BenchmarkKind, ...] = ("gemm forward", "gemm input gradient", "gemm weight gradient")
_ATTENTION: tuple[BenchmarkKind, ...] = ("attention forward", "attention backward")
_EXECUTION_S = 0.1
"""About the longest execution of one benchmark at the catalogue's peak rate."""
_LEAST_TOKENS = 16
_BACKWARD_FLOPS = 2.5
_WIDEST = 4
"""Bytes of an element of the widest format."""
_COPIES = 4
"""Tensors alive for one element of an elementwise benchmark: input, output and their gradients."""
_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Scale:
    """Sizes that suit a kind of device."""

    matrices: tuple[tuple[int, int, int], ...]
    """(tokens, inputs, outputs), small ones among them: they show the losses at edges."""
    lengths: tuple[int, ...]
    heads: int
    width: int
    copies: tuple[int, ...]
    hidden: int
    messages: tuple[int, ...]
    parameters: tuple[int, ...]
    most_bytes: int
    """Of the operands of one execution."""


CPU = Scale(
    matrices=(
        *((64, 64, 64), (128, 64, 256), (128, 256, 256), (256, 128, 512), (512, 256, 128)),
        *((256, 512, 512), (64, 1024, 256), (512, 256, 768), (32, 256, 1024), (512, 512, 1024)),
    ),
    lengths=(64, 128, 256, 512, 1024),
    heads=4,
    width=64,
    copies=(16 * _MIB, 64 * _MIB),
    hidden=256,
    messages=(4 * _KIB, 64 * _KIB, 512 * _KIB, 2 * _MIB, 8 * _MIB),
    parameters=(1 << 20, 1 << 22),
    most_bytes=128 * _MIB,
)
GPU = Scale(
    matrices=(
        *((512, 512, 512), (1024, 1024, 1024), (2048, 1024, 4096), (4096, 512, 4096), (4096, 4096, 512)),
        *((2048, 2048, 2048), (8192, 4096, 1024), (4096, 4096, 4096), (8192, 8192, 2048), (8192, 4096, 14336)),
    ),
    lengths=(512, 1024, 2048, 4096, 8192),
    heads=32,
    width=128,
    copies=(256 * _MIB, 1024 * _MIB),
    hidden=4096,
    messages=(64 * _KIB, 1 * _MIB, 8 * _MIB, 64 * _MIB, 256 * _MIB),
    parameters=(1 << 26, 1 << 28),
    most_bytes=4096 * _MIB,
)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the measurement is for."""

    device: RunDevice
    processes: int
    precision: Precision
    flops_per_s: float
    """Peak matrix rate of a process, which bounds the sizes."""
    model: ModelSpec | None = None
    seq_len: int | None = None
    quick: bool = False
    """Fewer sizes."""
    narrow: bool = False
    """The device multiplies in 8 bits."""

    @property
    def scale(self) -> Scale:
        return CPU if self.device == "cpu" else GPU

    @property
    def most_flops(self) -> float:
        """Of one execution."""
        return _EXECUTION_S * self.flops_per_s


def worklist(wanted: Wanted) -> tuple[Benchmark, ...]:
    """The benchmarks in the order in which they run, each once."""
    found = [
        *_copies(wanted),
        *_matrices(wanted),
        *_attention(wanted),
        *_elementwise(wanted),
        *_host(wanted),
        *_optimizer(wanted),
        *_collectives(wanted),
    ]
    unique = {one.model_dump_json(): one for one in found}
    return tuple(unique.values())


def _thinned(values: tuple[int, ...], wanted: Wanted) -> tuple[int, ...]:
    """All values, or every second from the largest down."""
    return tuple(sorted(values[::-1][::2])) if wanted.quick else values


def _copies(wanted: Wanted) -> Iterator[Benchmark]:
    for size in wanted.scale.copies:
        yield Benchmark(kind="copy", shape={"bytes": size})
    if wanted.device == "cuda":
        for kind in ("host to device", "device to host"):
            yield Benchmark.model_validate({"kind": kind, "shape": {"bytes": 64 * _MIB}})


def _matrices(wanted: Wanted) -> Iterator[Benchmark]:
    general = wanted.scale.matrices[::2] if wanted.quick else wanted.scale.matrices
    shapes = [(1, 1, 1), *general, *_of_model(wanted)]
    formats: list[Precision] = [wanted.precision]
    if wanted.narrow:
        formats.append("fp8")
    for precision in formats:
        for tokens, inputs, outputs in shapes:
            if _WIDEST * inputs * outputs > wanted.scale.most_bytes:
                continue
            fitting = _fitting(tokens, 2.0 * inputs * outputs, wanted)
            # 8-bit kernels take multiples of 16 only.
            odd = precision == "fp8" and (inputs % 16 or outputs % 16 or fitting % 16)
            if not fitting or odd:
                continue
            shape = {"tokens": fitting, "inputs": inputs, "outputs": outputs}
            for kind in _GEMMS:
                yield Benchmark(kind=kind, shape=shape, precision=precision)


def _fitting(tokens: int, flops_per_token: float, wanted: Wanted) -> int:
    """Tokens whose work is not too much for one execution; 0 where even few are."""
    affordable = int(wanted.most_flops / flops_per_token)
    if affordable >= tokens:
        return tokens
    return affordable // _LEAST_TOKENS * _LEAST_TOKENS


def _of_model(wanted: Wanted) -> Iterator[tuple[int, int, int]]:
    """Matrices of the model's layers as one rank holds them, whole and split over tensor-parallel ranks."""
    model = wanted.model
    if model is None:
        return
    tokens = _tokens(wanted)
    degrees = [1] if wanted.quick else [degree for degree in (1, 2, wanted.processes) if degree <= 8]
    seen: set[tuple[int, int]] = set()
    for kind in distinct_kinds(model):
        for matrix in layer_matrices(model, kind):
            for degree in degrees:
                inputs = matrix.inputs // (degree if matrix.split == "row" else 1)
                outputs = matrix.outputs // (degree if matrix.split == "column" else 1)
                if inputs and outputs and (inputs, outputs) not in seen:
                    seen.add((inputs, outputs))
                    yield tokens, inputs, outputs
    yield tokens, model.hidden, model.vocab


def _tokens(wanted: Wanted) -> int:
    """Of a micro-batch of one sequence."""
    if wanted.seq_len is not None:
        return wanted.seq_len
    usual = 256 if wanted.device == "cpu" else 4096
    return min(usual, wanted.model.max_seq) if wanted.model is not None else usual


def _attention(wanted: Wanted) -> Iterator[Benchmark]:
    """By length at the usual width, at another width, and as the model has it."""
    scale, model = wanted.scale, wanted.model
    lengths = _thinned(scale.lengths, wanted)
    wide = {"heads": scale.heads, "kv_heads": scale.heads // 2, "width": scale.width}
    narrow = wide | {"width": scale.width // 2}
    shapes = [wide | {"length": length} for length in lengths]
    shapes += [narrow | {"length": length} for length in lengths[1::2]]
    if model is not None:
        kv_heads = model.heads if model.mla is not None else model.kv_heads
        own = {"heads": model.heads, "kv_heads": kv_heads, "width": head_widths(model)[0]}
        shapes.append(own | {"length": _tokens(wanted)})
    listed = [{"batch": 1, "heads": 1, "kv_heads": 1, "length": 1, "width": 2}]
    for shape in shapes:
        each = 4.0 * shape["length"] ** 2 * shape["width"] * _BACKWARD_FLOPS
        group = shape["heads"] // shape["kv_heads"]
        # Whole groups of heads that share keys and values, so that their number divides.
        groups = min(shape["kv_heads"], int(wanted.most_flops / each / group))
        if groups:
            listed.append({"batch": 1} | shape | {"heads": groups * group, "kv_heads": groups})
    for shape in listed:
        for kind in _ATTENTION:
            yield Benchmark(kind=kind, shape=shape, precision=wanted.precision)


def _elementwise(wanted: Wanted) -> Iterator[Benchmark]:
    """Of a layer of the model, or of a general one."""
    model, scale, tokens = wanted.model, wanted.scale, _tokens(wanted)
    heads = max(scale.hidden // scale.width, 1)
    layer = {
        "hidden": scale.hidden,
        "heads": heads,
        "kv_heads": max(heads // 4, 1),
        "head_dim": scale.width,
        "ffn": 3 * scale.hidden,
    }
    vocab = 4096 if wanted.device == "cpu" else 32_768
    if model is not None:
        width = head_widths(model)[0]
        kv_heads = model.heads if model.mla is not None else model.kv_heads
        ffn = model.moe.expert_ffn if model.moe is not None else model.ffn
        layer = {"hidden": model.hidden, "heads": model.heads, "kv_heads": kv_heads, "head_dim": width, "ffn": ffn}
        vocab = model.vocab
    least = {"tokens": 1, "hidden": 2, "heads": 1, "kv_heads": 1, "head_dim": 2, "ffn": 2}
    per_token = 2 * layer["hidden"] + layer["head_dim"] * (layer["heads"] + layer["kv_heads"]) + 2 * layer["ffn"]
    several = (tokens,) if wanted.quick else (max(tokens // 4, 1), tokens, 2 * tokens)
    yield Benchmark(kind="elementwise", shape=least, precision=wanted.precision)
    for count in sorted({_holding(count, per_token, wanted) for count in several}):
        yield Benchmark(kind="elementwise", shape={"tokens": count} | layer, precision=wanted.precision)
    yield Benchmark(kind="loss", shape={"tokens": 1, "vocab": 2}, precision=wanted.precision)
    shape = {"tokens": _holding(tokens, vocab, wanted), "vocab": vocab}
    yield Benchmark(kind="loss", shape=shape, precision=wanted.precision)


def _holding(tokens: int, elements: int, wanted: Wanted) -> int:
    """Tokens of so many elements each whose tensors, with gradients and intermediate results, are not too large."""
    return max(1, min(tokens, wanted.scale.most_bytes // (_COPIES * _WIDEST * elements)))


def _host(wanted: Wanted) -> Iterator[Benchmark]:
    """Blocks whose elements are nothing beside the time of issuing them."""
    shape = {"tokens": 4, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 32}
    yield Benchmark(kind="block", shape=shape, precision=wanted.precision)


def _optimizer(wanted: Wanted) -> Iterator[Benchmark]:
    sizes = wanted.scale.parameters[:1] if wanted.quick else wanted.scale.parameters
    for size in sizes:
        yield Benchmark(kind="optimizer", shape={"parameters": size})
    yield Benchmark(kind="cpu optimizer", shape={"parameters": sizes[0]})


def _collectives(wanted: Wanted) -> Iterator[Benchmark]:
    """Over pairs, where they fill the world, and over all processes."""
    sizes = {2, wanted.processes} if wanted.processes % 2 == 0 else {wanted.processes}
    for ranks in sorted(size for size in sizes if size > 1):
        for kind in COLLECTIVES:
            if kind == "send" and ranks != 2:
                continue
            for size in _thinned(wanted.scale.messages, wanted):
                yield Benchmark(kind=kind, shape={"bytes": size}, precision="fp32", ranks=ranks)
