"""Every legal candidate of one backend, as columns, with every rejection counted under its rule.

What is decided within a candidate stays open: layers per stage where the framework lets them be chosen, recomputed
layers of kinds that count layers, and the offloaded share.  Columns are multiplied out from the coarse to the fine,
rules in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.backends.base import Backend, RuleContext
from planner.cost.evaluate import CostContext
from planner.errors import InputError
from planner.search.choices import Choices
from planner.search.grid import divisors, expand, group_index
from planner.search.legality import Legality, Refusal, carry_on
from planner.search.outcome import Pin
from planner.search.pins import keep_pinned, places, read_pins, refused
from planner.search.savers import Savers
from planner.specs.batch import SCHEDULES, BoolArray, IntArray, StrategyBatch
from planner.specs.problems import named_in

MAX_TP = 64
"""Largest tensor-parallel degree tried without a pin; wider groups leave every known fast-link domain but one."""

OUTER_SLOTS = 3
"""Layer-sized places that embedding, head and multi-token prediction may take in an interleaved layout (one each)."""


@dataclass(frozen=True)
class Group:
    """Candidates that share the pipeline depth and the chunks of a rank, so that their arrays have equal shapes."""

    pp: int
    vpp: int
    free: bool
    """Layers of each virtual stage are open; otherwise ``batch.stage_layers`` is the framework's own split."""
    batch: StrategyBatch
    """``stage_layers`` holds the default split; recompute_layers and offload_optimizer their largest values."""
    counted: BoolArray
    """The number of recomputed layers is open."""
    steps: IntArray
    """The offloaded share is 1/steps ... steps/steps; 0 where nothing is offloaded."""
    bare_end: bool = False
    """The last virtual stage may hold the head alone; every other one holds at least one layer."""

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def least_layers(self) -> IntArray:
        """(S,) fewest layers of each virtual stage."""
        return np.array([1] * (self.pp * self.vpp - 1) + [1 - self.bare_end], dtype=np.int64)

    @property
    def least_of_rank(self) -> int:
        """Fewest layers of the rank that may hold fewest."""
        return self.vpp - self.bare_end

    def take(self, rows: Any) -> Group:
        return replace(self, batch=self.batch.take(rows), counted=self.counted[rows], steps=self.steps[rows])


class Space:
    """All legal candidates and the rejections so far.

    Recomputation and offload only ever cost time, so a bound of a candidate without them (a core) holds for all its
    variants, which are multiplied out on demand, by ``variants``.
    """

    def __init__(self, cores: tuple[Group, ...], legality: Legality, savers: Savers) -> None:
        self.cores = cores
        """No recomputation, no offload; whether that is legal is not said."""
        self._legality, self._savers = legality, savers
        self._last_rules = [rule for rule, _ in legality.pending]

    @property
    def rejected(self) -> dict[str, int]:
        """Rejections by rule; those of variants count as far as variants were asked for."""
        return dict(sorted(self._legality.rejected.items()))

    @property
    def refusals(self) -> list[Refusal]:
        """Examples of the latest rejections."""
        return self._legality.refusals

    @property
    def size(self) -> int:
        """Candidates, before the rules that look at recomputation and offload."""
        return sum(self._savers.count(core.batch) for core in self.cores)

    def variants(self, core: Group) -> Group:
        """The legal candidates made of these cores with every choice of recomputation and offload."""
        batch = self._legality.apply(self._last_rules, self._savers.expand(core.batch))
        counted, steps = self._savers.open_choices(batch)
        return replace(core, batch=batch, counted=counted, steps=steps)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Everything multiplied out (small problems only: this can be millions of rows)."""
        return tuple(group for group in map(self.variants, self.cores) if len(group))


def even_layout(layers: int, stages: int) -> tuple[int, ...]:
    """``layers`` over ``stages`` as equally as possible, the longer stages in the middle of the model."""
    base, more = divmod(layers, stages)
    start = (stages - more) // 2
    return tuple(base + (start <= stage < start + more) for stage in range(stages))


def stage_cap(layers: int, pp: int, vpp: int) -> int:
    """Most layers of a virtual stage.

    The interleaved schedule runs all chunks in lockstep, so with several chunks a rank none may exceed the even
    share; with one chunk a stage can hold whatever the others leave.
    """
    return -(-layers // (pp * vpp)) if vpp > 1 else layers - pp + 1


def enumerate_space(context: CostContext, pins: Mapping[str, Pin], give_up: Callable[[], None] = carry_on) -> Space:
    """All legal candidates under the pins; InputError if a pin leaves none, with the rule that forbids it.

    ``give_up`` is called every few rules, here and for variants, and raises where there is no time for more."""
    return _Enumeration(context, read_pins(pins), give_up).run()


class _Enumeration:
    """One walk from coarse to fine columns."""

    def __init__(self, context: CostContext, pins: dict[str, Pin], give_up: Callable[[], None]) -> None:
        self.model, self.cluster, self.job = context.model, context.cluster, context.job
        self.backend: Backend = context.backend
        self.pins = pins
        self.choices = Choices(context, pins)
        self.kinds = self.choices.kinds
        empty = _coarse_batch(np.zeros((0, 4), dtype=np.int64))
        rules = RuleContext(model=self.model, cluster=self.cluster, job=self.job, batch=empty, kinds=self.kinds)
        self.legality = Legality.of(self.backend.rules, rules, give_up)
        self.decided: set[str] = set()
        self.layouts: dict[tuple[int, int], tuple[bool, tuple[int, ...]]] = {}

    def run(self) -> Space:
        batch = self._coarse()
        batch = self._step(batch, self._pipeline, "vpp", "schedule")
        batch = self._step(batch, self._experts, "ep", "etp", "sequence_parallel")
        batch = self._step(batch, self._micro_batches, "micro_batch")
        batch = self._step(batch, self._sharding, "zero_stage", "shard_degree", "secondary_shard_degree")
        cores = self._grouped(batch)
        if not cores and self.pins:
            raise self._pinned_out()
        return Space(cores, self.legality, Savers(self.kinds, self.choices.recompute(), self.choices.offload()))

    def _step(self, batch: StrategyBatch, function: Any, *columns: str) -> StrategyBatch:
        batch = function(batch)
        self.decided |= set(columns)
        batch = self.legality.filter(batch, self.decided)
        if len(batch) == 0 and self.pins:
            raise self._pinned_out()
        return batch

    def _coarse(self) -> StrategyBatch:
        gpus = self.cluster.gpus
        whole = divisors(gpus)
        tps = [d for d in whole if d <= MAX_TP or d == self.pins.get("tp")]
        pps = [d for d in whole if d <= self.model.layers or d == self.pins.get("pp")]
        grid = np.array(
            [
                (tp, cp, pp, gpus // (tp * cp * pp))
                for tp in keep_pinned(self.pins, "tp", tps)
                for pp in keep_pinned(self.pins, "pp", pps)
                if gpus % (tp * pp) == 0
                for cp in keep_pinned(self.pins, "cp", divisors(gpus // (tp * pp)))
                if "dp" not in self.pins or gpus // (tp * cp * pp) == self.pins["dp"]
            ],
            dtype=np.int64,
        ).reshape(-1, 4)
        if len(grid) == 0:
            raise self.choices.no_mesh()
        self.decided |= {"tp", "cp", "pp", "dp"}
        batch = self.legality.filter(_coarse_batch(grid), self.decided)
        if len(batch) == 0 and self.pins:
            raise self._pinned_out()
        return batch

    def _pipeline(self, batch: StrategyBatch) -> StrategyBatch:
        seen: set[tuple[int, str]] = set()

        def options(pp: int) -> list[tuple[int, int]]:
            chosen = []
            for vpp in self._chunk_counts(pp):
                schedules = self.backend.schedules(pp, vpp)
                seen.update((vpp, schedule) for schedule in schedules)
                if "vpp" not in self.pins or vpp == self.pins["vpp"]:
                    kept = keep_pinned(self.pins, "pipeline_schedule", schedules)
                    chosen += [(vpp, SCHEDULES.index(schedule)) for schedule in kept]
            if not chosen:
                self.legality.count("layer-split", int((batch.pp == pp).sum()))
            return chosen

        out = expand(batch, ("vpp", "schedule"), ("pp",), options)
        if len(out) == 0 and "vpp" in self.pins and self.pins["vpp"] not in {vpp for vpp, _ in seen}:
            raise refused(
                self.pins, "vpp", f"no schedule of {self.backend.title} splits {self.model.layers} layers that way",
                sorted({vpp for vpp, _ in seen}),
            )  # fmt: skip
        if len(out) == 0 and "pipeline_schedule" in self.pins:
            raise refused(
                self.pins, "pipeline_schedule", f"{self.backend.title} cannot run it with these stages",
                sorted({schedule for _, schedule in seen}),
            )  # fmt: skip
        return out

    def _chunk_counts(self, pp: int) -> list[int]:
        """Chunks of a rank that have a layout; more than one needs equally filled chunks, end slots included."""
        layers = self.model.layers
        counts = [1]
        if pp > 1:
            counts += [
                v
                for v in range(2, layers // pp + 1)
                if any((layers + slots) % (pp * v) == 0 for slots in range(OUTER_SLOTS + 1))
            ]
        return [v for v in counts if self.backend.schedules(pp, v) and self._layout(pp, v)[1]]

    def _layout(self, pp: int, vpp: int) -> tuple[bool, tuple[int, ...]]:
        """Whether the split is open, and the default one (empty when there is none)."""
        if (pp, vpp) not in self.layouts:
            free = pp * vpp > 1 and self.backend.layouts(self.model, pp, vpp) == "free"
            layout = self.backend.default_layout(self.model, pp, vpp)
            if layout is None:
                layout = even_layout(self.model.layers, pp * vpp) if free and pp * vpp <= self.model.layers else ()
            self.layouts[pp, vpp] = (free, layout)
        return self.layouts[pp, vpp]

    def _experts(self, batch: StrategyBatch) -> StrategyBatch:
        eps, spread = self.choices.experts()

        def options(tp: int) -> list[tuple[int, int, bool]]:
            etps = keep_pinned(self.pins, "etp", sorted({1, tp}) if spread else [1])
            parallel = self.backend.sequence_parallel_choices if tp > 1 else (False,)
            choices = keep_pinned(self.pins, "sequence_parallel", parallel)
            return [(ep, etp, choice) for ep in eps for etp in etps for choice in choices]

        out = expand(batch, ("ep", "etp", "sequence_parallel"), ("tp",), options)
        if len(out) == 0 and len(batch) and "etp" in self.pins:
            raise refused(self.pins, "etp", "it must be 1 or tp", sorted({1, *(int(tp) for tp in np.unique(batch.tp))}))
        if len(out) == 0 and len(batch) and "sequence_parallel" in self.pins:
            raise self.choices.no_sequence_parallelism()
        return out

    def _micro_batches(self, batch: StrategyBatch) -> StrategyBatch:
        total = self.job.global_batch
        seen: set[int] = set()

        def options(dp: int) -> list[tuple[int]]:
            natural = divisors(total // dp) if total % dp == 0 else [1]
            seen.update(natural)
            return [
                (size,)
                for size in keep_pinned(self.pins, "micro_batch", natural)
                if "grad_accum" not in self.pins or total == size * dp * int(self.pins["grad_accum"])
            ]

        out = expand(batch, ("micro_batch",), ("dp",), options)
        if len(out) == 0 and len(batch):
            name, values = ("micro_batch", sorted(seen)) if "micro_batch" in self.pins else ("grad_accum", None)
            raise self.choices.no_batch(name, values)
        return out

    def _sharding(self, batch: StrategyBatch) -> StrategyBatch:
        stages = self.choices.zero_stages()
        seen: dict[str, set[int]] = {"shard_degree": set(), "secondary_shard_degree": set()}

        def options(tp: int, cp: int, dp: int) -> list[tuple[int, int, int]]:
            chosen = []
            for stage in stages:
                degrees = self.backend.shard_degrees(self.cluster, tp, cp, dp, stage)
                seen["shard_degree"].update(degrees)
                for degree in keep_pinned(self.pins, "shard_degree", degrees):
                    nearer = self.backend.secondary_shard_degrees(self.cluster, degree, stage)
                    seen["secondary_shard_degree"].update(nearer)
                    kept = keep_pinned(self.pins, "secondary_shard_degree", nearer)
                    chosen += [(stage, degree, second) for second in kept]
            return chosen

        names = ("zero_stage", "shard_degree", "secondary_shard_degree")
        out = expand(batch, names, ("tp", "cp", "dp"), options)
        if len(out) == 0 and len(batch):
            for name, values in seen.items():
                if name in self.pins and self.pins[name] not in values:
                    raise refused(self.pins, name, f"{self.backend.title} does not offer it here", sorted(values))
        return out

    def _grouped(self, batch: StrategyBatch) -> tuple[Group, ...]:
        if len(batch) == 0:
            return ()
        first, index = group_index((batch.pp, batch.vpp))
        self.decided.add("stage_layers")
        ready = self.legality.ready(self.decided)
        cores = []
        for number, row in enumerate(first):
            pp, vpp = int(batch.pp[row]), int(batch.vpp[row])
            free, layout = self._layout(pp, vpp)
            part = batch.take(np.flatnonzero(index == number))
            rows = np.broadcast_to(np.array(layout, dtype=np.int64), (len(part), pp * vpp))
            part = self.legality.apply(ready, part.with_values(stage_layers=rows))
            if len(part):
                zeros = np.zeros(len(part), dtype=np.int64)
                bare = free and vpp > 1 and self.backend.bare_last_stage
                cores.append(Group(pp, vpp, free, part, zeros.astype(np.bool_), zeros, bare))
        return tuple(cores)

    def _pinned_out(self) -> InputError:
        return pinned_out(self.pins, self.legality.refusals, self.backend.name)


def pinned_out(pins: Mapping[str, Pin], refusals: list[Refusal], backend: str) -> InputError:
    """The error for pins that rules leave nothing of."""
    pinned = ", ".join(f"{name}={value}" for name, value in pins.items())
    if not refusals:
        return InputError("no candidate has all pinned values at once", where=places(pins), got=pinned,
                          hint="leave one of them open")  # fmt: skip
    refusal = refusals[0]
    return InputError(
        f"{refusal.equation} [{refusal.rule.id}: {refusal.rule.reason}]",
        where=places(named_in(refusal.equation, pins) or pins),
        got=pinned,
        allowed=refusal.allowed,
        hint=f"`planner backends {backend} --rules` lists them; change or drop one of the pins",
    )


def _coarse_batch(grid: IntArray) -> StrategyBatch:
    """Rows of (tp, cp, pp, dp) with neutral values in every other column."""
    n = len(grid)
    one, zero = np.ones(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    return StrategyBatch(
        tp=grid[:, 0], sequence_parallel=np.zeros(n, dtype=np.bool_), cp=grid[:, 1], pp=grid[:, 2], vpp=one,
        schedule=zero, ep=one, etp=one, dp=grid[:, 3], zero_stage=zero, shard_degree=one, secondary_shard_degree=zero,
        micro_batch=one, recompute_kind=zero, recompute_layers=zero, offload_optimizer=np.zeros(n), offload_device=zero,
        offload_parameters=zero, stage_layers=np.zeros((n, 0), dtype=np.int64),
    )  # fmt: skip
