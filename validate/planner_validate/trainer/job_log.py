"""What rank 0 prints of a run, for the log of a job: the groups of the ranks, each step, and where the results are.

Groups carry the names of the plan's README.md; all other ranks are silent unless they fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planner.render.pytorch import expert_topology, topology
from planner.render.topology import GroupKind, Topology
from planner.specs.validation import GradientCheck, RunConfig, StepMeasure
from planner.units import counted, duration

SHOWN_GROUPS = 16
SHOWN_RANKS = 8


class JobLog:
    """The lines of one rank; printed by rank 0 alone, at once, for pipes are written in blocks otherwise."""

    def __init__(self, config: RunConfig, rank: int, results: Path) -> None:
        self._config, self._results, self._speaks = config, results, rank == 0

    def start(self) -> None:
        """All ranks have joined: who works with whom, and where each leaves what it measured."""
        self._say(f"{counted(self._config.strategy.gpus, 'rank')} joined: {self._config.model.name}")
        for line in group_lines(self._config):
            self._say(f"groups {line}")
        self._say(f"every rank writes its results to {self._results.absolute()}")

    def gradients(self, checked: GradientCheck) -> None:
        """The check of a tiny copy is done."""
        self._say(
            f"gradient check {'passed' if checked.passed else 'FAILED'}: they differ from the unsharded model's by "
            f"{checked.largest_relative_error:.1e}, {checked.tolerance:.0e} is allowed"
        )

    def step(self, name: str, index: int, number: int, measure: StepMeasure) -> None:
        """A step is done."""
        loss = "not finite" if measure.loss is None else f"{measure.loss:.4f}"
        self._say(f"{name} {index + 1} of {number}: {duration(measure.seconds)}, loss {loss}")

    def end(self) -> None:
        """All ranks are done; this one's results are written."""
        self._say(f"done: `planner validate plan.json --results {self._results}` compares with the plan")

    def _say(self, text: str) -> None:
        if self._speaks:
            print(f"[planner] {text}", flush=True)  # noqa: T201 - standard output is the job's log


def group_lines(config: RunConfig) -> list[str]:
    """A line for every kind of group whose ranks share something: name, size, meaning, all its groups."""
    strategy, cluster = config.strategy, config.cluster
    grids = [topology(strategy, cluster), *([expert_topology(strategy, cluster)] if strategy.ep > 1 else [])]
    lines: dict[str, str] = {}
    for grid in grids:
        for kind in grid.groups():
            text = f"{kind.name} {kind.size} ({kind.meaning}): {listed(groups(grid, kind))}"
            lines.setdefault(kind.name, text)
    return list(lines.values())


def listed(found: Sequence[Sequence[int]]) -> str:
    """``[0, 1] [2, 3]``; of many groups the first ones."""
    shown = " ".join(f"[{members(ranks)}]" for ranks in found[:SHOWN_GROUPS])
    return shown if len(found) <= SHOWN_GROUPS else f"{shown} and {len(found) - SHOWN_GROUPS} more"


def groups(grid: Topology, kind: GroupKind) -> list[list[int]]:
    """All groups of a kind, by their first rank."""
    return [kind.ranks(rank) for rank in range(grid.ranks) if kind.coordinate(rank) == 0]


def members(ranks: Sequence[int]) -> str:
    """``0, 2, 4``; many are shown by the first ones and the last."""
    shown = list(map(str, ranks))
    return ", ".join(shown if len(shown) <= SHOWN_RANKS else [*shown[:3], "...", shown[-1]])
