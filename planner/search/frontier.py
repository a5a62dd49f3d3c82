"""The candidates that can still matter: those whose bound is below what has been found, for the best plan or an
alternative.

Goes through the whole space once, in blocks that fit the cache, and keeps bounds, coefficients and incumbents of the
few rows that survive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from planner.cost.evaluate import CostContext
from planner.search.bounds import Needs, core_bound, fits_at_all, full_bound, memory_bound, quick_bound
from planner.search.incumbent import Incumbents, construct
from planner.search.inner import Inner, prepare, prepare_together
from planner.search.space import Group, Space
from planner.specs.batch import BoolArray, FloatArray, IntArray, StrategyBatch

TIE = 1e-9
"""Relative difference below which two plans count as equally good (the rounding of the constraint model)."""

CHUNK_ELEMENTS = 1_500_000
"""Rows times ranks of a block: its few dozen float64 arrays stay below 500 MB."""
CHUNK_ROWS = 50_000
FIRST_CORES = 256
"""Cores of a group that are multiplied out first; their plans spare most of the rest."""
VARIANTS = 16
"""About how many variants a core has."""
SEED_ROWS = 96
"""Best rows of a block, one a mesh, that get incumbents before the rest is looked at."""


@dataclass(frozen=True)
class Block:
    """Survivors of one block of candidates."""

    inner: Inner
    needs: Needs
    bound: FloatArray
    """(N,) lower bound of what is minimised."""
    incumbents: Incumbents
    mesh: IntArray
    """(N,) code of (tp, cp, pp, ep, dp, zero_stage)."""

    def take(self, rows: BoolArray | IntArray) -> Block:
        needs = Needs(self.needs.recomputed[rows], self.needs.step[rows], self.needs.most_steps[rows])
        i = self.incumbents
        kept = Incumbents(i.step_time_s[rows], i.memory_bytes[rows], i.layout[rows], i.recomputed[rows], i.step[rows])
        return Block(self.inner.take(rows), needs, self.bound[rows], kept, self.mesh[rows])


@dataclass
class Frontier:
    """Collects survivors; ``top`` alternatives on other meshes than the best are kept alive too."""

    context: CostContext
    top: int
    minimise_memory: bool
    out_of_time: Callable[[], bool]
    give_up: Callable[[], None]
    """Raises where there is no time even for a first plan."""
    blocks: list[Block] = field(default_factory=list)
    mesh_best: dict[int, float] = field(default_factory=dict)
    """Best value found on each mesh."""
    does_not_fit: int = 0
    examined: int = 0
    """Legal candidates whose memory was looked at."""
    complete: bool = True
    """False when the time limit cut the walk short."""

    def collect(self, space: Space) -> None:
        """Bound every core, then the variants of those that may matter, and keep the survivors."""
        codes = MeshCodes(space)
        cores: list[tuple[float, int, Group, FloatArray]] = []
        for core, bound in self._core_bounds(space):
            self.give_up()
            order = np.argsort(bound, kind="stable")
            cores.append((float(bound.min()), len(cores), core.take(order), bound[order]))
        for _, _, core, bound in sorted(cores, key=lambda item: item[:2]):
            if not self._core(space, core, bound, codes):
                self.complete = False
                break
        self.blocks = [block.take(self._alive(block.bound, block.mesh)) for block in self.blocks]
        self.blocks = [block for block in self.blocks if len(block.bound)]

    def _rows(self, group: Group) -> int:
        return int(np.clip(CHUNK_ELEMENTS // group.pp, 256, CHUNK_ROWS))

    def _core_bounds(self, space: Space) -> Iterator[tuple[Group, FloatArray]]:
        """Every group of cores with its bounds; small groups of one pipeline depth are priced together."""
        if self.minimise_memory:
            yield from ((core, np.zeros(len(core))) for core in space.cores)
            return
        bundle: list[Group] = []
        for core in sorted(space.cores, key=lambda group: (group.pp, group.vpp)):
            rows = self._rows(core)
            if bundle and (bundle[0].pp != core.pp or sum(map(len, bundle)) + len(core) > rows):
                yield from self._bundle_bounds(bundle)
                bundle = []
            if len(core) <= rows:
                bundle.append(core)
            else:
                parts = (core.take(slice(start, start + rows)) for start in range(0, len(core), rows))
                yield core, np.concatenate([core_bound(prepare(self.context, part)) for part in parts])
        yield from self._bundle_bounds(bundle)

    def _bundle_bounds(self, bundle: list[Group]) -> Iterator[tuple[Group, FloatArray]]:
        for inner in prepare_together(self.context, bundle) if bundle else ():
            yield inner.group, core_bound(inner)

    def _core(self, space: Space, core: Group, bound: FloatArray, codes: MeshCodes) -> bool:
        """Variants of a group of cores, best bounds first; false when the time is up."""
        mesh = codes.of(core.batch)
        size, start = FIRST_CORES, 0
        while start < len(core):
            if self.out_of_time() and self.mesh_best:
                return False
            self.give_up()
            rows = np.arange(start, min(start + size, len(core)))
            alive = rows[self._alive(bound[rows], mesh[rows])]
            if len(alive):
                self._chunk(space.variants(core.take(alive)), codes)
            start, size = start + size, max(self._rows(core) // VARIANTS, FIRST_CORES)
        return True

    def threshold(self) -> float:
        """A candidate on a new mesh has to be better than this to be shown at all."""
        values = sorted(self.mesh_best.values())
        return values[self.top] if len(values) > self.top else float("inf")

    def found(self, mesh: int, value: float) -> None:
        """Note a plan."""
        if value < self.mesh_best.get(mesh, float("inf")):
            self.mesh_best[mesh] = value

    def _alive(self, bound: FloatArray, mesh: IntArray) -> BoolArray:
        threshold = self.threshold()
        names, inverse = np.unique(mesh, return_inverse=True)
        limits = np.array([min(threshold, self.mesh_best.get(int(name), np.inf)) for name in names])
        return np.asarray(bound <= limits[inverse] * (1 + TIE)) if len(names) else np.zeros(0, dtype=np.bool_)

    def _chunk(self, group: Group, codes: MeshCodes) -> None:
        if len(group) == 0:
            return
        self.examined += len(group)
        inner = prepare(self.context, group)
        loose, possible = fits_at_all(inner)
        self.does_not_fit += int((~possible).sum())
        inner, loose = inner.take(possible), _take_needs(loose, possible)
        if len(inner) == 0:
            return
        mesh = codes.of(inner.group.batch)
        quick = quick_bound(inner, loose) if not self.minimise_memory else np.zeros(len(inner))
        alive = self._alive(quick, mesh)
        order = np.flatnonzero(alive)[np.argsort(quick[alive], kind="stable")]
        seeds = order[np.sort(np.unique(mesh[order], return_index=True)[1])][:SEED_ROWS]
        self._examine(inner, loose, mesh, seeds)
        rest = order[~np.isin(order, seeds)]
        for start in range(0, len(rest), 2048):
            rows = rest[start : start + 2048]
            self._examine(inner, loose, mesh, rows[self._alive(quick[rows], mesh[rows])])

    def _examine(self, inner: Inner, loose: Needs, mesh: IntArray, rows: IntArray) -> None:
        """Full bounds and incumbents of some rows; survivors become a block."""
        if len(rows) == 0:
            return
        part, codes = inner.take(rows), mesh[rows]
        bound = full_bound(part, _take_needs(loose, rows))
        value = memory_bound(part, bound.needs) if self.minimise_memory else bound.step_time_s
        keep = self._alive(value, codes) & np.isfinite(value)
        if not keep.any():
            return
        part, codes, needs = part.take(keep), codes[keep], _take_needs(bound.needs, keep)
        incumbents = construct(part, needs, value[keep], minimise_memory=self.minimise_memory)
        best = incumbents.memory_bytes if self.minimise_memory else incumbents.step_time_s
        for code, reached in zip(codes.tolist(), best.tolist(), strict=True):
            self.found(code, reached)
        block = Block(part, needs, value[keep], incumbents, codes)
        self.blocks.append(block.take(self._alive(block.bound, block.mesh)))


class MeshCodes:
    """Numbers the combinations of (tp, cp, pp, ep, dp, zero_stage) that occur."""

    def __init__(self, space: Space) -> None:
        columns = [[getattr(group.batch, name) for group in space.cores] for name in ("tp", "cp", "pp", "ep")]
        self.values = [
            np.unique(np.concatenate([np.unique(part) for part in parts] or [np.zeros(0)])) for parts in columns
        ]

    def of(self, batch: StrategyBatch) -> IntArray:
        """(N,) codes; dp follows from the others."""
        code = batch.zero_stage.copy()
        for name, values in zip(("tp", "cp", "pp", "ep"), self.values, strict=True):
            code = code * (len(values) + 4) + np.searchsorted(values, getattr(batch, name))
        return code


def _take_needs(needs: Needs, rows: BoolArray | IntArray) -> Needs:
    return replace(needs, recomputed=needs.recomputed[rows], step=needs.step[rows], most_steps=needs.most_steps[rows])
