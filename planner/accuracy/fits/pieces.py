"""What the cost model says of one small piece of work: the very functions that price a training step, asked for a
single matrix multiplication, collective or optimizer step.

Nothing is derived a second time here, so a constant that reproduces a measured piece reproduces it inside a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.backends.base import NONE, Backend
from planner.cost.attention import attention_s
from planner.cost.collectives import Group, group
from planner.cost.constants import ConstantTable
from planner.cost.context import CostContext, Work
from planner.cost.ends import head_time
from planner.cost.gemm import gemm_s
from planner.cost.groups import Groups
from planner.cost.layers import LayerTime, layer_time
from planner.cost.optimizer import gpu_step_s, host_link_bytes_per_s, host_step_s
from planner.cost.params import LayerKind
from planner.specs.batch import FloatArray
from planner.specs.benchmark import Benchmark, BenchmarkKind
from planner.specs.cluster import Cluster
from planner.specs.convert import from_strategy
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.strategy import Strategy

_WEIGHT_GRADIENT_BYTES = 8.0
_COPIED_TWICE = 2.0
"""A copy reads and writes."""


@dataclass(frozen=True)
class Pieces:
    """One machine as some table of constants describes it."""

    cluster: Cluster
    backend: Backend
    table: ConstantTable

    def seconds(self, benchmark: Benchmark) -> float:
        """Time of one execution."""
        return _FORMULAS[benchmark.kind](self, benchmark)

    @cached_property
    def _matrices(self) -> dict[str, CostContext]:
        return {}

    def plain(self, benchmark: Benchmark) -> CostContext:
        """Surroundings of what needs no model; one a number format."""
        known = self._matrices
        if benchmark.precision not in known:
            known[benchmark.precision] = self.work(benchmark, _DIMENSIONS).context
        return known[benchmark.precision]

    def work(self, benchmark: Benchmark, sizes: dict[str, int], micro_batch: int = 1) -> Work:
        """One layer of a dense model of these sizes on one rank."""
        length = sizes["tokens"]
        model = ModelSpec(
            name="piece",
            layers=1,
            hidden=sizes["hidden"],
            ffn=sizes["ffn"],
            heads=sizes["heads"],
            kv_heads=sizes["kv_heads"],
            head_dim=sizes["head_dim"],
            vocab=sizes.get("vocab", sizes["hidden"]),
            max_seq=length,
        )
        strategy = Strategy(
            micro_batch=micro_batch,
            global_batch=micro_batch,
            seq_len=length,
            precision=benchmark.precision,
            layers_per_stage=(1,),
        )
        job = Job(seq_len=length, global_batch=micro_batch, precision=benchmark.precision)
        context = CostContext(model, self.cluster, job, self.backend, self.table)
        return Work(context, from_strategy(strategy, (NONE,)))

    def group(self, benchmark: Benchmark) -> Group:
        """The groups of that many contiguous ranks."""
        size, stride = np.array([benchmark.ranks]), np.array([1])
        return group(self.plain(benchmark), size, stride)


_DIMENSIONS = {"tokens": 1, "hidden": 1, "ffn": 1, "heads": 1, "kv_heads": 1, "head_dim": 1}
_LAYER_KIND: LayerKind = ("attention", "dense")


def _one(seconds: FloatArray) -> float:
    return float(np.asarray(seconds).reshape(-1)[0])


def _gemm(pieces: Pieces, benchmark: Benchmark) -> float:
    tokens, inputs, outputs = (float(benchmark.shape[name]) for name in ("tokens", "inputs", "outputs"))
    context = pieces.plain(benchmark)
    arguments = (context.constants, context.layer_flops_per_s, context.stream_bytes_per_s)
    if benchmark.kind == "gemm forward":
        return _one(gemm_s(*arguments, tokens, inputs, outputs))
    if benchmark.kind == "gemm input gradient":
        return _one(gemm_s(*arguments, tokens, outputs, inputs))
    return _one(gemm_s(*arguments, inputs, tokens, outputs, out_bytes=_WEIGHT_GRADIENT_BYTES))


def _attention(pieces: Pieces, benchmark: Benchmark) -> float:
    shape = benchmark.shape
    heads, width = shape["heads"], shape["width"]
    sizes = {"hidden": heads * width, "ffn": 1, "heads": heads, "kv_heads": shape["kv_heads"], "head_dim": width}
    work = pieces.work(benchmark, sizes | {"tokens": shape["length"]}, shape["batch"])
    forward, backward = attention_s(work, _LAYER_KIND)
    return _one(forward if benchmark.kind == "attention forward" else backward)


def _copy(pieces: Pieces, benchmark: Benchmark) -> float:
    return _COPIED_TWICE * benchmark.shape["bytes"] / pieces.plain(benchmark).stream_bytes_per_s


def _layer(pieces: Pieces, benchmark: Benchmark) -> LayerTime:
    work = pieces.work(benchmark, benchmark.shape)
    return layer_time(work, Groups(work), _LAYER_KIND)


def _elementwise(pieces: Pieces, benchmark: Benchmark) -> float:
    layer = _layer(pieces, benchmark)
    terms = [layer.named(name) for name in ("norms", "rotary", "activation function")]
    return sum(_one(term.forward + term.backward) for term in terms)


def _block(pieces: Pieces, benchmark: Benchmark) -> float:
    return _one(_layer(pieces, benchmark).total())


def _loss(pieces: Pieces, benchmark: Benchmark) -> float:
    vocab = benchmark.shape["vocab"]
    work = pieces.work(benchmark, _DIMENSIONS | {"tokens": benchmark.shape["tokens"], "vocab": vocab})
    end = head_time(work, Groups(work), np.array([float(vocab)]), [])
    return sum(_one(term.forward + term.backward) for term in end.terms if term.name == "loss")


def _collective(pieces: Pieces, benchmark: Benchmark) -> float:
    among, size = pieces.group(benchmark), np.array([float(benchmark.shape["bytes"])])
    formulas: dict[str, Callable[[FloatArray], FloatArray]] = {
        "all-reduce": among.all_reduce_s,
        "all-gather": among.all_gather_s,
        "reduce-scatter": among.all_gather_s,
        "all-to-all": among.all_to_all_s,
        "send": among.send_s,
    }
    return _one(formulas[benchmark.kind](size))


def _optimizer(pieces: Pieces, benchmark: Benchmark) -> float:
    return _one(gpu_step_s(pieces.plain(benchmark), np.array([float(benchmark.shape["parameters"])])))


def _cpu_optimizer(pieces: Pieces, benchmark: Benchmark) -> float:
    return _one(host_step_s(pieces.plain(benchmark), np.array([float(benchmark.shape["parameters"])])))


def _host_link(pieces: Pieces, benchmark: Benchmark) -> float:
    return benchmark.shape["bytes"] / host_link_bytes_per_s(pieces.cluster)


_FORMULAS: dict[BenchmarkKind, Callable[[Pieces, Benchmark], float]] = {
    "gemm forward": _gemm,
    "gemm input gradient": _gemm,
    "gemm weight gradient": _gemm,
    "attention forward": _attention,
    "attention backward": _attention,
    "copy": _copy,
    "elementwise": _elementwise,
    "loss": _loss,
    "block": _block,
    "all-reduce": _collective,
    "all-gather": _collective,
    "reduce-scatter": _collective,
    "all-to-all": _collective,
    "send": _collective,
    "optimizer": _optimizer,
    "cpu optimizer": _cpu_optimizer,
    "host to device": _host_link,
    "device to host": _host_link,
}
