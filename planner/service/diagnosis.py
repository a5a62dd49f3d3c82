"""Why a run is slower than it should be: the measured speed against the estimate of its configuration.

First whether figure and file are what they seem (per GPU or of all, another configuration than what ran), then what is
wrong in the file, then which part of the machine would have to be how much slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from planner.cost.context import CostContext
from planner.cost.evaluate import evaluate
from planner.errors import InputError
from planner.service.checked import Checked, CheckRequest
from planner.service.checking import advise, examine, report
from planner.service.inputs import checked_float
from planner.service.lints import NOT_NEEDED
from planner.service.requests import Progress
from planner.specs.batch import StrategyBatch
from planner.specs.check import Cause, CheckReport, Diagnosis
from planner.specs.cluster import Cluster
from planner.specs.finding import RANK
from planner.specs.plan import Estimate
from planner.specs.strategy import Strategy
from planner.units import TERA, duration, gib

NEAR = 1.5
"""A figure that is this far outside the expected range may still be a misreading, where the factor is a large one."""
LARGE_FACTOR = 4.0
MOST_SLOWER = 200.0
"""A part of the machine that would have to be slower than this is not the cause by itself."""
MUCH_SLOWER = 5.0
"""Parts that are this much slower are broken or set up wrongly; it is as likely that something else takes the time."""


def diagnose(asked: CheckRequest, measured_tokens_per_s: float, progress: Progress | None = None) -> CheckReport:
    """The check of the configuration, with the measured speed of the whole job explained."""
    checked_float(measured_tokens_per_s, "--measured-tokens-per-s", 0, 1e15, above=True)
    found = examine(asked)
    if found.plan is None or found.context is None or found.completed is None or found.completed.batch is None:
        problems = [finding.message for finding in found.findings if finding.severity == "error"]
        raise InputError(
            "the configuration cannot be priced: " + "; ".join((*found.warnings, *problems)),
            where=", ".join(found.files),
            hint="give what is missing (--model, --gpu, --gpus, --global-batch), or correct it: see `planner check`",
        )
    changes = advise(found, progress)
    told = _Diagnosing(found, found.context, found.completed.batch, found.plan.estimate, measured_tokens_per_s)
    return report(found, changes).model_copy(update={"diagnosis": told.diagnosis()})


@dataclass(frozen=True)
class _Diagnosing:
    found: Checked
    context: CostContext
    batch: StrategyBatch
    expected: Estimate
    measured: float
    """Tokens per second of the whole job."""

    @property
    def strategy(self) -> Strategy:
        assert self.found.plan is not None  # noqa: S101  # checked by diagnose
        return self.found.plan.strategy

    def step_s(self, tokens_per_s: float) -> float:
        return self.strategy.global_batch * self.strategy.seq_len / tokens_per_s

    def diagnosis(self) -> Diagnosis:
        step = self.step_s(self.measured)
        low, high = self.expected.step_time_range_s
        mfu = self.expected.mfu * self.expected.step_time_s / step
        return Diagnosis(
            measured_tokens_per_s=self.measured,
            measured_step_time_s=step,
            mfu=mfu,
            model_flops_per_s_per_gpu=mfu * self._peak,
            peak_flops_per_s_per_gpu=self._peak,
            expected_step_time_s=self.expected.step_time_s,
            expected_step_time_range_s=self.expected.step_time_range_s,
            slowdown=step / self.expected.step_time_s,
            as_expected=low <= step <= high,
            causes=tuple(self._causes(step, mfu)),
        )

    @property
    def _peak(self) -> float:
        return self.expected.model_flops_per_s_per_gpu / self.expected.mfu

    def _causes(self, step: float, mfu: float) -> Iterator[Cause]:
        low, high = self.expected.step_time_range_s
        if not low <= step <= high:
            exact = list(self._misread(1.0))
            yield from exact or self._misread(NEAR)
            # Small factors are met by chance, too.
            if exact and max(step / high, low / step) >= LARGE_FACTOR / NEAR:
                return
        yield from self._another_run(mfu)
        yield from self._in_the_file()
        if step > high:
            yield from self._in_the_machine(step)
        elif step < low:
            yield Cause(
                id="faster-than-expected",
                message="faster than any run of this kind that was measured",
                hint="check that the loss, the sequence length and the number of trained tokens are what you think",
            )

    def _misread(self, tolerance: float) -> Iterator[Cause]:
        """Factors by which such figures are commonly off, where one of them explains the difference: all of it, or with
        a tolerance that only large factors get the most of it."""
        s, cluster = self.strategy, self.context.cluster
        meant: tuple[tuple[str, float, str], ...] = (
            ("figure-per-gpu", cluster.gpus, "tokens/s of one GPU, not of the job"),
            ("figure-per-node", cluster.local_gpus, "tokens/s of one node, not of the job"),
            ("figure-per-replica", s.dp, "tokens/s of one data-parallel replica, not of the job"),
            ("figure-in-sequences", s.seq_len, "sequences (samples) per second, not tokens"),
            ("figure-in-steps", s.global_batch * s.seq_len, "steps per second, not tokens"),
            ("figure-in-micro-batches", s.grad_accum, "counted per micro-batch, not per step"),
            ("figure-over-all-ranks", 1 / (s.tp * s.cp * s.pp), "a sum over all ranks, of which those of one replica"
             " see the same tokens"),
        )  # fmt: skip
        seen: set[float] = set()
        for name, factor, told in meant:
            if factor in seen or factor == 1 or not self._explains(factor, tolerance):
                continue
            seen.add(factor)
            measured = self.measured * factor
            near = "" if tolerance == 1.0 else f" about ({duration(self.step_s(measured))} a step)"
            yield Cause(
                id=name,
                message=f"the figure is{near} as expected if it is {told} (x {factor:.4g})",
                hint=f"--measured-tokens-per-s {measured:.6g} if so",
            )

    def _explains(self, factor: float, tolerance: float) -> bool:
        low, high = self.expected.step_time_range_s
        large = tolerance == 1.0 or max(factor, 1 / factor) >= LARGE_FACTOR
        return large and low / tolerance <= self.step_s(self.measured * factor) <= high * tolerance

    def _another_run(self, mfu: float) -> Iterator[Cause]:
        """Signs that what ran is not what the file says."""
        needed, there = self.expected.peak_memory_bytes, self.expected.memory_limit_bytes
        if needed > there:
            yield Cause(
                id="should-not-have-run",
                message=f"by the estimate this configuration needs {gib(needed)} of {gib(there)} and does not run: "
                "another one was measured",
                hint="say which: recomputation in the code (--recompute full), --seq-len, --global-batch or --gpus",
            )
        if mfu > 1:
            yield Cause(
                id="faster-than-the-peak",
                message=f"{mfu * self._peak / TERA:,.1f} TFLOP/s are more than a GPU has in "
                f"{self.context.job.precision} ({self._peak / TERA:,.1f})",
                hint="the figure counts something else (padding, every rank of a replica), or model, sequence length, "
                "number format or GPUs are not those of the run",
            )

    def _in_the_file(self) -> Iterator[Cause]:
        """What the configuration says wrong; what a single change would bring stands among the changes."""
        for finding in sorted(self.found.findings, key=lambda each: RANK[each.severity]):
            if finding.severity != "note" and finding.id not in NOT_NEEDED:
                yield Cause(id=finding.id, message=finding.message, hint=finding.hint)

    def _in_the_machine(self, step_s: float) -> Iterator[Cause]:
        """Parts of the machine that, slower by one factor, explain the measured time: the smallest factor first."""
        explained = []
        for part in PARTS:
            factor = self._explaining_factor(part, step_s)
            if factor is not None:
                explained.append((factor, part))
        explained.sort(key=lambda each: each[0])
        for factor, part in explained:
            yield Cause(id=part.id, message=f"{part.what} would have to be {_times(factor)} slower", hint=part.hint)
        if not explained or explained[0][0] > MUCH_SLOWER:
            yield Cause(
                id="outside-the-step",
                message="the time may as well be lost outside the step: a part of the machine that alone explains it "
                + ("would have to be much slower" if explained else "does not exist"),
                hint="look at data loading, logging, checkpoints and evaluation: time ten steps with mock data and "
                "nothing else",
            )

    def _explaining_factor(self, part: _Part, step_s: float) -> float | None:
        """The slowdown of one part at which the estimate equals the measured step; None beyond MOST_SLOWER."""

        def seconds(factor: float) -> float:
            slower = part.slower(self.context, factor)
            return float(evaluate(slower, self.batch).step_time_s[0])

        if seconds(MOST_SLOWER) < step_s:
            return None
        low, high = 1.0, MOST_SLOWER
        while high / low > 1.01:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if seconds(middle) >= step_s else (middle, high)
        return high


def _times(factor: float) -> str:
    return f"{factor:.1f} times" if factor < MUCH_SLOWER else f"{factor:.0f} times"


@dataclass(frozen=True)
class _Part:
    """A part of the machine that can be slower than its figure."""

    id: str
    what: str
    hint: str
    slower: Callable[[CostContext, float], CostContext]


def _slower_network(context: CostContext, factor: float) -> CostContext:
    cluster = context.cluster
    bus = cluster.network_bus_bytes_per_s
    spans = tuple(
        span.model_copy(update={"bus_bytes_per_s": span.bus_bytes_per_s / factor}) for span in cluster.network_spans
    )
    changes = {
        "nic_bytes_per_s": cluster.nic_bytes_per_s / factor,
        "network_bus_bytes_per_s": None if bus is None else bus / factor,
        "network_spans": spans,
    }
    return replace(context, cluster=cluster.model_copy(update=changes))


def _slower_links(context: CostContext, factor: float) -> CostContext:
    accelerator = context.cluster.accelerator
    rates = {
        name: value / factor
        for name, value in accelerator.fabric.model_dump().items()
        if name.endswith("bytes_per_s") and value is not None
    }
    fabric = accelerator.fabric.model_copy(update=rates)
    return replace(context, cluster=_with_accelerator(context.cluster, fabric=fabric))


def _slower_compute(context: CostContext, factor: float) -> CostContext:
    accelerator = context.cluster.accelerator
    formats = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp6", "fp4")
    rates = {name: value / factor for name in formats if (value := getattr(accelerator.peak, name)) is not None}
    peak = accelerator.peak.model_copy(update=rates)
    memory = accelerator.memory.model_copy(update={"bytes_per_s": accelerator.memory.bytes_per_s / factor})
    return replace(context, cluster=_with_accelerator(context.cluster, peak=peak, memory=memory))


def _slower_host(context: CostContext, factor: float) -> CostContext:
    return _with_factors(context, factor, ("launch_s", "moe_host_s", "blocking_launch_s"))


def _slower_host_step(context: CostContext, factor: float) -> CostContext:
    return _with_factors(context, 1 / factor, ("cpu_adam_bytes_per_s",))


def _slower_host_link(context: CostContext, factor: float) -> CostContext:
    link = context.cluster.accelerator.host_link
    measured = link.measured_bytes_per_s
    changes = {
        "bytes_per_s": link.bytes_per_s / factor,
        "measured_bytes_per_s": None if measured is None else measured / factor,
    }
    return replace(context, cluster=_with_accelerator(context.cluster, host_link=link.model_copy(update=changes)))


def _with_factors(context: CostContext, factor: float, names: tuple[str, ...]) -> CostContext:
    factors = {**context.table.factors, **{name: context.table.factors.get(name, 1.0) * factor for name in names}}
    return replace(context, table=context.table.with_factors(factors))


def _with_accelerator(cluster: Cluster, **changes: object) -> Cluster:
    return cluster.model_copy(update={"accelerator": cluster.accelerator.model_copy(update=changes)})


PARTS = (
    _Part(
        "slow-network",
        "the network between the nodes",
        "run nccl-tests (all_reduce_perf) over two nodes; look for a NIC that is down, TCP instead of RDMA "
        "(NCCL_DEBUG=INFO), oversubscription",
        _slower_network,
    ),
    _Part(
        "slow-links",
        "the links between the GPUs of a node",
        "`nvidia-smi topo -m` and all_reduce_perf on one node: NVLink may be off, or peer access disabled",
        _slower_links,
    ),
    _Part(
        "slow-gpu",
        "the GPUs themselves",
        "`nvidia-smi -q -d CLOCK,PERFORMANCE`: power or thermal caps, another job on the GPU, a debug build, a "
        "fallback attention kernel",
        _slower_compute,
    ),
    _Part(
        "slow-host",
        "the host that launches the kernels",
        "look for busy or unpinned CPUs, profilers, CUDA_LAUNCH_BLOCKING, synchronising log calls",
        _slower_host,
    ),
    _Part(
        "slow-host-optimizer",
        "the offloaded optimizer's step on the host",
        "see that the compiled CPU Adam runs (DeepSpeed: `ds_report` lists cpu_adam) on all cores: OMP_NUM_THREADS, "
        "ranks bound to their cores and memory",
        _slower_host_step,
    ),
    _Part(
        "slow-host-link",
        "the link between host and GPU",
        "`nvidia-smi -q` shows the PCIe generation and width in use; pin the host memory",
        _slower_host_link,
    ),
)
"""In the order in which they are usually the cause."""
