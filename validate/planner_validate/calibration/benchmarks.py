"""Times small pieces of work on the devices of this machine, on all processes at once: what ``planner calibrate
--on-this-machine`` starts through torchrun.

Every process works on the same benchmark at the same time, as in training, so that processes which share memory or
cores are measured sharing them.  What the times mean for the cost model is decided elsewhere."""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name that everybody knows it by

from planner.specs.benchmark import Benchmark, BenchmarkKind
from planner.specs.measuring import BenchmarkConfig, BenchmarkResult, Timing
from planner.specs.model import ModelSpec
from planner.specs.validation import RunConfig, StepMeasure
from planner_validate.runs.devices import cores
from planner_validate.trainer.layers import Attention, Core, Mlp, Norm, Rotary, activated
from planner_validate.trainer.model import Block
from planner_validate.trainer.training import build, make_optimizer
from planner_validate.trainer.worker import Post, leave, report

Execute = Callable[[], None]

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "nvfp4": None,
}
_POOL_BYTES = 64 << 20
"""Operands are rotated through this much memory, so that they do not come out of a cache in which training would not
find them."""
_MOST_OPERANDS = 8
_MOST_EXECUTIONS = 2000
"""Of one timed batch."""
_TENSOR_PARAMETERS = 1 << 18
"""Parameters of one tensor that the optimizer benchmarks update."""
_WEIGHT_SPREAD = 0.02


@dataclass(frozen=True)
class Machine:
    """Where this process works."""

    device: torch.device
    rank: int
    world_size: int
    groups: dict[int, Any]
    """Process group of this rank by size."""
    repeats: int
    batch_s: float

    def wait(self) -> None:
        """Until everything issued so far is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def agree(self, value: float, operation: Any) -> float:
        """One value for all processes."""
        if self.world_size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=operation)
        return float(shared.item())

    def meet(self) -> None:
        """All processes start what follows together."""
        if self.world_size > 1:
            dist.barrier()
        self.wait()


@dataclass(frozen=True)
class Sample:
    """What one visit to a benchmark found."""

    seconds: tuple[float, ...] = ()
    """Of one execution, by repeat."""
    problem: str = ""
    """Why it could not be timed; empty where it was."""


def sample(machine: Machine, benchmark: Benchmark) -> Sample:
    """Time a benchmark ``machine.repeats`` times; every process calls it with the same one.

    Where any process cannot do it, none of them reports a time."""
    problem = ""
    execute: Execute = _nothing
    executions = 1
    try:
        execute, executions = _prepared(machine, benchmark)
        first = _timed(machine, execute, 1)
        first = min(first, _timed(machine, execute, 1))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        problem, first = _one_line(error), 1.0
    if machine.agree(1.0 if problem else 0.0, dist.ReduceOp.MAX):
        return Sample(problem=problem or "another process could not do it")
    slowest = machine.agree(first, dist.ReduceOp.MAX)
    count = max(1, min(_MOST_EXECUTIONS, math.ceil(machine.batch_s / slowest)))
    _timed(machine, execute, count)
    seconds = []
    for _ in range(machine.repeats):
        machine.meet()
        seconds.append(_timed_together(machine, execute, count, alone=benchmark.ranks == 1) / count / executions)
    return Sample(seconds=tuple(seconds))


def _timing(samples: Sequence[Sample]) -> Timing:
    """Median and spread over all visits; one that failed leaves no time."""
    problem = next((one.problem for one in samples if one.problem), "")
    if problem:
        return Timing(reason=problem)
    seconds = [value for one in samples for value in one.seconds]
    low, middle, high = _quartiles(seconds)
    return Timing(seconds=middle, spread=(high - low) / 2.0 / middle, repeats=len(seconds))


def _nothing() -> None:
    """What stands in for work that could not be prepared."""


def _timed(machine: Machine, execute: Execute, count: int) -> float:
    """Seconds of ``count`` executions."""
    if machine.device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            execute()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    begun = time.perf_counter()
    for _ in range(count):
        execute()
    return time.perf_counter() - begun


def _timed_together(machine: Machine, execute: Execute, count: int, *, alone: bool) -> float:
    """Seconds of ``count`` executions while all processes do the same.

    Processes that outnumber the cores take turns.  Work of a process ``alone`` takes the cores' time that it uses,
    times the turns: by the clock, the last one to end would have had a core for itself.  Work that waits for others
    takes from the first start to the last end, by the clock that all of them share."""
    if machine.device.type == "cuda":
        return _timed(machine, execute, count)
    turns = machine.world_size / cores()
    if alone and turns > 1.0:
        used = time.process_time()
        _timed(machine, execute, count)
        return machine.agree(time.process_time() - used, dist.ReduceOp.MAX) * turns
    begun = time.monotonic()
    _timed(machine, execute, count)
    ended = time.monotonic()
    return machine.agree(ended, dist.ReduceOp.MAX) - machine.agree(begun, dist.ReduceOp.MIN)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """25th, 50th and 75th percentile, interpolated."""
    return tuple(  # type: ignore[return-value]
        float(value)
        for value in torch.quantile(
            torch.tensor(values, dtype=torch.float64), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
        )
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _prepared(machine: Machine, benchmark: Benchmark) -> tuple[Execute, int]:
    """(function, executions of the benchmark that one call of it is)."""
    if benchmark.ranks > 1 and benchmark.ranks not in machine.groups:
        raise ValueError(f"groups of {benchmark.ranks} do not fill {machine.world_size} processes")
    return _KINDS[benchmark.kind](machine, benchmark), 2 if benchmark.kind == "send" else 1


def _dtype(benchmark: Benchmark) -> Any:
    dtype = _DTYPES[benchmark.precision]
    if dtype is None:
        raise NotImplementedError(f"{benchmark.precision} matrices are not measured")
    return dtype


def _pool(size: int, make: Callable[[], Any]) -> Iterator[Any]:
    """Endless operands: as many different ones as fill the pool, ``size`` bytes each."""
    copies = max(1, min(_MOST_OPERANDS, _POOL_BYTES // max(size, 1)))
    return itertools.cycle([make() for _ in range(copies)])


def _gemm(machine: Machine, benchmark: Benchmark) -> Execute:
    """The three multiplications of a linear layer with weights of outputs x inputs, in the layouts that autograd
    uses."""
    tokens, inputs, outputs = (benchmark.shape[name] for name in ("tokens", "inputs", "outputs"))
    if benchmark.precision == "fp8":
        return _scaled_gemm(machine, benchmark)
    dtype = _dtype(benchmark)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=machine.device).to(dtype)

    left, right = {
        "gemm forward": ((tokens, inputs), (outputs, inputs)),
        "gemm input gradient": ((tokens, outputs), (outputs, inputs)),
        "gemm weight gradient": ((tokens, outputs), (tokens, inputs)),
    }[benchmark.kind]
    size = dtype.itemsize * (math.prod(left) + math.prod(right))
    pool = _pool(size, lambda: (random(*left), random(*right)))

    def forward() -> None:
        x, weight = next(pool)
        F.linear(x, weight)

    def input_gradient() -> None:
        gradient, weight = next(pool)
        torch.mm(gradient, weight)

    def weight_gradient() -> None:
        gradient, x = next(pool)
        torch.mm(gradient.t(), x)

    return {
        "gemm forward": forward,
        "gemm input gradient": input_gradient,
        "gemm weight gradient": weight_gradient,
    }[benchmark.kind]


def _scaled_gemm(machine: Machine, benchmark: Benchmark) -> Execute:
    """The same in 8 bits with one scale a tensor and 16-bit results."""
    tokens, inputs, outputs = (benchmark.shape[name] for name in ("tokens", "inputs", "outputs"))
    m, k, n = {
        "gemm forward": (tokens, inputs, outputs),
        "gemm input gradient": (tokens, outputs, inputs),
        "gemm weight gradient": (outputs, tokens, inputs),
    }[benchmark.kind]
    one = torch.ones((), device=machine.device)

    def operand(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=machine.device).to(torch.float8_e4m3fn)

    pool = _pool(m * k + k * n, lambda: (operand(m, k), operand(n, k).t()))

    def multiply() -> None:
        left, right = next(pool)
        torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return multiply


def _attention_operands(machine: Machine, benchmark: Benchmark) -> Iterator[Any]:
    """Queries (b, s, n, d), keys and values (b, s, kv heads, d)."""
    batch, length, width = (benchmark.shape[name] for name in ("batch", "length", "width"))
    heads, kv_heads, dtype = benchmark.shape["heads"], benchmark.shape["kv_heads"], _dtype(benchmark)

    def tensor(count: int) -> torch.Tensor:
        return torch.randn(batch, length, count, width, device=machine.device, dtype=dtype, requires_grad=True)

    size = batch * length * width * (heads + 2 * kv_heads) * dtype.itemsize
    return _pool(2 * size, lambda: (tensor(heads), tensor(kv_heads), tensor(kv_heads)))


def _attention_forward(machine: Machine, benchmark: Benchmark) -> Execute:
    """Causal attention as a layer in training calls it, so that what its backward pass needs is kept."""
    pool, core = _attention_operands(machine, benchmark), Core()

    def forward() -> None:
        core(*next(pool))

    return forward


def _attention_backward(machine: Machine, benchmark: Benchmark) -> Execute:
    pool, core = _attention_operands(machine, benchmark), Core()
    operands = [next(pool) for _ in range(_MOST_OPERANDS)]
    outputs = [core(*qkv) for qkv in operands]
    gradient = torch.randn_like(outputs[0])
    cycle = itertools.cycle(zip(outputs, operands, strict=True))

    def backward() -> None:
        output, qkv = next(cycle)
        torch.autograd.grad(output, qkv, gradient, retain_graph=True)

    return backward


def _copy(machine: Machine, benchmark: Benchmark) -> Execute:
    size = benchmark.shape["bytes"]

    def tensor() -> torch.Tensor:
        return torch.zeros(max(size // 4, 1), device=machine.device)

    pool = _pool(2 * size, lambda: (tensor(), tensor()))

    def copy() -> None:
        target, source = next(pool)
        target.copy_(source)

    return copy


def _elementwise(machine: Machine, benchmark: Benchmark) -> Execute:
    """What a layer does beside matrices and attention, forward and backward, by the parts of the training runs."""
    shape, dtype = benchmark.shape, _dtype(benchmark)
    tokens, hidden, width, ffn = (shape[name] for name in ("tokens", "hidden", "head_dim", "ffn"))
    device = machine.device
    rotary = Rotary(width)
    norms = [_filled(Norm("rmsnorm", hidden), device, dtype) for _ in range(2)]
    heads = (shape["heads"], shape["kv_heads"])

    def tensor(*dims: int) -> torch.Tensor:
        return torch.randn(1, *dims, device=device, dtype=dtype, requires_grad=True)

    def operands() -> list[torch.Tensor]:
        states = [tensor(tokens, hidden) for _ in range(2)]
        turned = [tensor(tokens, count, width) for count in heads]
        return [*states, *turned, tensor(tokens, ffn), tensor(tokens, ffn)]

    elements = tokens * (2 * hidden + width * sum(heads) + 2 * ffn)
    pool = _pool(4 * elements * dtype.itemsize, operands)
    weights = [norm.weight for norm in norms]

    def layer() -> None:
        inputs = next(pool)
        first, second, query, key, gate, up = inputs
        outputs = [
            norms[0](first),
            norms[1](second),
            first + second,
            second + first,
            rotary(query),
            rotary(key),
            activated(gate, up, "silu"),
        ]
        torch.autograd.grad(outputs, [*inputs, *weights], [output.detach() for output in outputs])

    return layer


def _filled(module: Any, device: torch.device, dtype: Any) -> Any:
    """The module on the device with small random weights."""
    module = module.to(device=device, dtype=dtype)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(std=_WEIGHT_SPREAD)
    return module


def _loss(machine: Machine, benchmark: Benchmark) -> Execute:
    tokens, vocab = benchmark.shape["tokens"], benchmark.shape["vocab"]
    dtype = _dtype(benchmark)
    labels = torch.randint(vocab, (tokens,), device=machine.device)
    pool = _pool(
        4 * dtype.itemsize * tokens * vocab,
        lambda: torch.randn(tokens, vocab, device=machine.device, dtype=dtype, requires_grad=True),
    )

    def loss() -> None:
        logits = next(pool)
        torch.autograd.grad(F.cross_entropy(logits.float(), labels), logits)

    return loss


def _block(machine: Machine, benchmark: Benchmark) -> Execute:
    """Forward and backward pass of a decoder block of very few elements."""
    shape, dtype = benchmark.shape, _dtype(benchmark)
    spec = ModelSpec(
        name="block",
        layers=1,
        vocab=1,
        max_seq=shape["tokens"],
        hidden=shape["hidden"],
        ffn=shape["ffn"],
        heads=shape["heads"],
        kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
    )
    attention = Attention(spec, Core(), Rotary(spec.head_dim))
    block = _filled(Block(attention, Mlp(spec, spec.ffn), spec), machine.device, dtype)
    x = torch.randn(1, shape["tokens"], spec.hidden, device=machine.device, dtype=dtype, requires_grad=True)
    gradient = torch.ones_like(x)

    def step() -> None:
        block(x).backward(gradient)

    return step


def _collective(machine: Machine, benchmark: Benchmark) -> Execute:
    """``bytes`` of an all-reduce, of the gathered side of a gather or scatter, or sent by a rank in an exchange."""
    group, ranks, dtype = machine.groups[benchmark.ranks], benchmark.ranks, _dtype(benchmark)
    part = max(1, benchmark.shape["bytes"] // dtype.itemsize // ranks)
    whole = torch.zeros(part * ranks, device=machine.device, dtype=dtype)
    piece = torch.zeros(part, device=machine.device, dtype=dtype)
    other = torch.zeros_like(whole)

    def all_reduce() -> None:
        dist.all_reduce(whole, group=group)

    # Newer versions of PyTorch have other names for the two.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def all_gather() -> None:
        gather(whole, piece, group=group)

    def reduce_scatter() -> None:
        scatter(piece, whole, group=group)

    def all_to_all() -> None:
        dist.all_to_all_single(other, whole, group=group)

    kinds: dict[str, Execute] = {
        "all-reduce": all_reduce,
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
        "all-to-all": all_to_all,
    }
    return kinds[benchmark.kind]


def _send(machine: Machine, benchmark: Benchmark) -> Execute:
    """There and back between the two ranks of a pair: two executions a call."""
    group, dtype = machine.groups[benchmark.ranks], _dtype(benchmark)
    there = torch.zeros(max(1, benchmark.shape["bytes"] // dtype.itemsize), device=machine.device, dtype=dtype)
    back = torch.zeros_like(there)
    first = machine.rank % 2 == 0
    peer = machine.rank + (1 if first else -1)

    def exchange(operation: Any, tensor: torch.Tensor) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group=group)]):
            work.wait()

    def round_trip() -> None:
        if first:
            exchange(dist.isend, there)
            exchange(dist.irecv, back)
        else:
            exchange(dist.irecv, back)
            exchange(dist.isend, there)

    return round_trip


def _adam(parameters: int, device: torch.device, *, clipped: bool) -> Execute:
    """AdamW over tensors of a usual size with fp32 states, after norm and clipping where ``clipped``, as the training
    runs do both."""
    sizes = [min(_TENSOR_PARAMETERS, parameters - done) for done in range(0, parameters, _TENSOR_PARAMETERS)]
    weights = [torch.nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer = make_optimizer(weights)

    def step() -> None:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if clipped:
            total = torch.stack([torch.linalg.vector_norm(each).square() for each in gradients]).sum()
            factor = (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0)
            for each in gradients:
                each.mul_(factor)
        optimizer.step()

    return step


def _optimizer(machine: Machine, benchmark: Benchmark) -> Execute:
    return _adam(benchmark.shape["parameters"], machine.device, clipped=True)


def _cpu_optimizer(_: Machine, benchmark: Benchmark) -> Execute:
    return _adam(benchmark.shape["parameters"], torch.device("cpu"), clipped=False)


def _host_link(machine: Machine, benchmark: Benchmark) -> Execute:
    """Copies between pinned host memory and the device."""
    if machine.device.type != "cuda":
        raise NotImplementedError("the device works in host memory")
    size = benchmark.shape["bytes"]
    near = torch.zeros(size, dtype=torch.uint8, device=machine.device)
    far = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    target, source = (near, far) if benchmark.kind == "host to device" else (far, near)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return copy


_KINDS: dict[BenchmarkKind, Callable[[Machine, Benchmark], Execute]] = {
    "gemm forward": _gemm,
    "gemm input gradient": _gemm,
    "gemm weight gradient": _gemm,
    "attention forward": _attention_forward,
    "attention backward": _attention_backward,
    "copy": _copy,
    "elementwise": _elementwise,
    "loss": _loss,
    "block": _block,
    "all-reduce": _collective,
    "all-gather": _collective,
    "reduce-scatter": _collective,
    "all-to-all": _collective,
    "send": _send,
    "optimizer": _optimizer,
    "cpu optimizer": _cpu_optimizer,
    "host to device": _host_link,
    "device to host": _host_link,
}


def _groups(world_size: int, sizes: Sequence[int], rank: int, timeout: datetime.timedelta) -> dict[int, Any]:
    """This rank's group of every size that divides the world."""
    mine: dict[int, Any] = {}
    for size in sorted(set(sizes)):
        if size < 2 or world_size % size:
            continue
        for start in range(0, world_size, size):
            members = list(range(start, start + size))
            group = dist.new_group(members, timeout=timeout)
            if rank in members:
                mine[size] = group
    return mine


def run(config: BenchmarkConfig, post: Post) -> BenchmarkResult:
    """Everything that the configuration asks of this process."""
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    torch.set_num_threads(config.threads)
    device = torch.device(config.device, local_rank) if config.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=config.timeout_s)
    post.phase("joining the process group")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    groups = _groups(world_size, [one.ranks for one in config.benchmarks], rank, timeout)
    machine = Machine(device, rank, world_size, groups, config.repeats, config.batch_s)
    timings = _pieces(config, machine, post)
    return BenchmarkResult(
        rank=rank,
        world_size=world_size,
        host=platform.node(),
        device_name=_device_name(device),
        versions={"python": platform.python_version(), "torch": str(torch.__version__)} | _cuda_version(device),
        timings=timings,
        runs=tuple(_trained(run, post, f"training run {index + 1}") for index, run in enumerate(config.runs)),
    )


def _pieces(config: BenchmarkConfig, machine: Machine, post: Post) -> tuple[Timing, ...]:
    """All benchmarks, visited again and again, so that what disturbs the machine for a while does not fall on a few of
    them."""
    samples: list[list[Sample]] = [[] for _ in config.benchmarks]
    total = config.visits * len(config.benchmarks)
    for done, (_, index) in enumerate(itertools.product(range(config.visits), range(len(config.benchmarks)))):
        benchmark, known = config.benchmarks[index], samples[index]
        if known and known[-1].problem:
            continue
        post.phase(f"{benchmark.kind}, {benchmark.label} ({100 * done // total} %)")
        known.append(sample(machine, benchmark))
    return tuple(_timing(visits) for visits in samples)


def _trained(config: RunConfig, post: Post, title: str) -> tuple[StepMeasure, ...]:
    """The measured steps of a short training run."""
    post.phase(title)
    trainer = build(config)
    steps = []
    for index in range(config.warmup_steps + config.measured_steps):
        post.phase(f"{title}, step {index + 1}")
        steps.append(trainer.step(index))
    return tuple(steps[config.warmup_steps :])


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return _processor() or platform.processor() or platform.machine()


def _processor() -> str:
    """The processor's name as Linux tells it; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _cuda_version(device: torch.device) -> dict[str, str]:
    return {"cuda": str(torch.version.cuda)} if device.type == "cuda" else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m planner_validate.calibration.benchmarks --config FILE --out DIR``, by torchrun on every rank."""
    parser = argparse.ArgumentParser(description="Times small pieces of work for a machine profile.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    rank = int(os.environ.get("RANK", "0"))
    post = Post(given.out, rank)
    try:
        config = BenchmarkConfig.model_validate_json(given.config.read_text(encoding="utf-8"))
        post.result(run(config, post))
    except BaseException as error:
        report(post, rank, error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    leave(main())
