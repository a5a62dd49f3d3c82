"""What is drawn of a plan, as numbers: every picture of the page, the report and the terminal comes from these records.

Filled from a plan document by ``planner.report.figures``; nothing here knows how it is drawn."""

from __future__ import annotations

from typing import Literal

from planner.specs.base import Spec

PartKind = Literal["arithmetic", "recomputation", "communication", "waiting", "update", "mixed"]
"""``mixed`` are small parts of several kinds, drawn as one."""
SlotKind = Literal["forward", "backward", "weight-gradient"]
SlotPhase = Literal["warm-up", "steady", "cool-down"]
LinkLevel = Literal["node", "domain", "network"]
"""Fast links inside a node, fast links of a domain that spans nodes, the network between domains."""


class PlanPoint(Spec):
    """One plan in the scatter of step time against memory."""

    rank: int
    """Place in the document: 1 is the best, the alternatives follow, then the best of other frameworks."""
    backend: str
    label: str
    """``TP 4, PP 4, DP 8, ZeRO 1``."""
    step_time_s: float
    step_time_range_s: tuple[float, float]
    peak_memory_bytes: float
    peak_memory_upper_bytes: float
    on_frontier: bool
    """No other drawn plan is both faster and smaller."""


class Term(Spec):
    """A named share of a bar."""

    name: str
    value: float
    """Bytes."""


class StageMemory(Spec):
    """Peak memory of neighbouring pipeline stages that look alike, by term; the terms add up to ``total_bytes``."""

    first_stage: int
    last_stage: int
    terms: tuple[Term, ...]
    total_bytes: float


class TimePart(Spec):
    """One bar of the waterfall: from ``start_s`` to ``start_s + seconds``."""

    name: str
    kind: PartKind
    start_s: float
    seconds: float


class Slot(Spec):
    """Work of one pipeline rank on one micro-batch of one of its model chunks."""

    stage: int
    chunk: int
    micro_batch: int
    kind: SlotKind
    phase: SlotPhase
    start_s: float
    end_s: float


class Schedule(Spec):
    """The pipeline of one step, simulated from the estimate's stage times; None in ``Pictures`` without a pipeline."""

    name: str
    stages: int
    micro_batches: int
    shown_micro_batches: int
    """Long steady states are cut: micro-batches of the run that is drawn."""
    slots: tuple[Slot, ...]
    """Of a run of ``shown_micro_batches``, rank by rank in order of time; its times are its own, from 0 on."""
    simulated_s: float
    """Of all micro-batches, from the first forward to the last backward pass."""
    busy_share: float
    """Of the simulated time, over all ranks; the rest is bubble."""


class RankPlace(Spec):
    """Where one rank is expected and which groups it belongs to."""

    rank: int
    node: int
    coordinates: dict[str, int]
    """Axis (tp, cp, dp, pp, ep ...) -> position; ranks that differ in one axis only share that axis' group."""
    groups: dict[str, int]
    """Kind of group -> number of the rank's group, counted in the order of the groups' lowest ranks."""


class GroupAxis(Spec):
    """Groups of one kind: along one dimension of the rank grid, or along two (``dp x cp``)."""

    name: str
    size: int
    stride: int
    """Distance between neighbouring ranks of a group."""
    shares: str
    """What the group shares: ``one layer's matrices``."""
    nodes: int
    """Most nodes that one group spans."""


class Traffic(Spec):
    """What one GPU sends in one step for one kind of group."""

    axis: str
    """tp, cp, ep, pp or dp, whatever the framework calls the axes of its grid; ``dp x cp`` where the ranks of a
    sequence have the same weights."""
    level: LinkLevel
    """The slowest link that any group of the kind crosses."""
    what: str
    sent_bytes_per_gpu: float
    """Over links of any level, by the pipeline rank that sends most."""
    exposed_s: float
    """Of the step time, not hidden behind work."""


class TopologyMap(Spec):
    """Ranks on nodes; of very many nodes the first ones and the last."""

    axes: tuple[GroupAxis, ...]
    """Those with more than one rank, fastest first, by the framework's names; the experts' own axes behind."""
    ranks: tuple[RankPlace, ...]
    nodes: int
    shown_nodes: tuple[int, ...]
    gpus_per_node: int
    """Those that the job uses."""
    domain_gpus: int
    """Neighbouring ranks that share fast links, over several nodes where these are more than a node has."""
    built_domain_gpus: int
    """GPUs that a domain has, not all of them filled by a job that takes several."""
    traffic: tuple[Traffic, ...]


class Pictures(Spec):
    """Everything that is drawn of one plan document."""

    memory_limit_bytes: float
    points: tuple[PlanPoint, ...]
    stages: tuple[StageMemory, ...]
    time: tuple[TimePart, ...]
    kinds: dict[PartKind, float]
    """Seconds of the whole step by kind, also of the small parts that ``time`` has as one."""
    schedule: Schedule | None
    topology: TopologyMap
