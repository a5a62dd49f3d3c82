"""What every picture of a plan says, in words and numbers: captions, legends and the tables beside the figures.

Formats the records of ``planner.specs.pictures``; computes nothing about the plan itself."""

from __future__ import annotations

from planner.render.topology import ranks_text
from planner.report.tables import Figure, Mark, table
from planner.service.parts import MEMORY_TERMS
from planner.specs.pictures import LinkLevel, PartKind, Pictures, Schedule, SlotKind, StageMemory
from planner.units import counted, duration, gib, percent

KINDS: dict[PartKind, str] = {
    "arithmetic": "arithmetic",
    "recomputation": "recomputation",
    "communication": "communication that nothing hides",
    "waiting": "waiting",
    "update": "optimizer and once a step",
    "mixed": "small parts of several kinds",
}
LEVELS: dict[LinkLevel, str] = {
    "node": "links inside a node",
    "domain": "links of a domain that spans nodes",
    "network": "network",
}
WORK: dict[SlotKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "weight-gradient": "weight gradients",
}
MOST_COLOURS = 12
"""Colours of the style sheet; further groups start again at the first."""
LEAST_SHARE = 0.0005
"""Of a step: a smaller one rounds to nothing."""


def points_figure(drawn: Pictures) -> Figure:
    """Step time against memory of every plan of the document."""
    best = drawn.points[0]
    low, high = best.step_time_range_s
    within = sum(low <= point.step_time_s <= high for point in drawn.points[1:])
    shape = (
        "Each number is a plan of the table: further left is faster, further down is smaller; the stroke above a point "
        "ends where its memory range ends."
    )
    if sum(point.on_frontier for point in drawn.points) > 1:
        shape += " The line joins the plans that no other drawn plan beats in both."
    others = counted(len(drawn.points) - 1, "other plan")
    sure = (
        f"{within} of {others} {'lies' if within == 1 else 'lie'} within the range of plan 1, {span(low, high)}: "
        "a measurement can turn their order around."
        if within
        else f"None of {others} lies within the range of plan 1, {span(low, high)}."
    )
    rows = [
        (
            str(point.rank),
            point.backend,
            point.label,
            duration(point.step_time_s),
            span(*point.step_time_range_s),
            gib(point.peak_memory_bytes),
            gib(point.peak_memory_upper_bytes),
            "yes" if point.on_frontier else "no",
        )
        for point in drawn.points
    ]
    columns = ">rank, backend, plan, >step time, >range, >peak memory, >up to, on the frontier"
    data = table("Drawn plans, est.", columns, rows)
    return Figure("points", "Step time against memory", f"{shape} {sure}", data, text_caption=sure)


def span(low_s: float, high_s: float) -> str:
    """``27 s to 40.7 s``."""
    return f"{duration(low_s)} to {duration(high_s)}"


def stage_name(row: StageMemory, stages: int) -> str:
    """``stage 0``, ``stages 1 to 6``; a plan without a pipeline has only ``every GPU``."""
    if stages == 1:
        return "every GPU"
    return (
        f"stage {row.first_stage}"
        if row.first_stage == row.last_stage
        else f"stages {row.first_stage} to {row.last_stage}"
    )


def stages_figure(drawn: Pictures) -> Figure:
    """Peak memory of each pipeline stage by term, against the limit."""
    stages = drawn.stages[-1].last_stage + 1
    fullest = max(drawn.stages, key=lambda row: row.total_bytes)
    fullest_name = f". The most is on {stage_name(fullest, stages)}" if stages > 1 else ""
    upper = drawn.points[0].peak_memory_upper_bytes
    limit = drawn.memory_limit_bytes
    over = f": {gib(upper - limit)} too much" if upper > limit else ""
    caption = (
        f"What fills a GPU at its fullest moment{fullest_name}: "
        f"{gib(fullest.total_bytes)}, up to {gib(upper)}, of {gib(limit)}{over}."
    )
    found = {term.name for row in drawn.stages for term in row.terms if term.value > 0}
    legend = tuple(
        Mark(f"c{number}", term.name, term.letter)
        for number, term in enumerate(MEMORY_TERMS, start=1)
        if term.name in found
    )
    terms = [mark.label for mark in legend]
    rows = [
        (
            stage_name(row, stages),
            *(gib(sizes[term]) if (sizes := _sizes(row)).get(term) else "-" for term in terms),
            gib(row.total_bytes),
            percent(row.total_bytes / limit),
        )
        for row in drawn.stages
    ]
    columns = ", ".join(["stage", *(f">{term}" for term in terms), ">total", ">of the limit"])
    title = "Memory of each stage" if stages > 1 else "Memory of a GPU"
    return Figure("stages", title, caption, table("Peak memory by term, est.", columns, rows), legend)


def _sizes(row: StageMemory) -> dict[str, float]:
    return {term.name: term.value for term in row.terms}


def time_figure(drawn: Pictures) -> Figure:
    """The parts of a step, one after the other."""
    total = drawn.points[0].step_time_s
    shown = [kind for kind in KINDS if abs(drawn.kinds.get(kind, 0.0)) >= LEAST_SHARE * total]
    shares = ", ".join(f"{KINDS[kind]} {percent(drawn.kinds[kind] / total)}" for kind in shown)
    where = " on the slowest stage" if drawn.schedule is not None else ""
    caption = f"One step of {duration(total)}{where}, part after part: {shares}."
    rows = [
        (part.name, KINDS[part.kind], signed(part.seconds), percent(part.seconds / total), duration(part.start_s))
        for part in drawn.time
    ]
    return Figure(
        "time",
        "Where the step goes",
        caption,
        table("Parts of a step, est.", "part, kind, >time, >of the step, >starts at", rows),
        tuple(Mark(f"kind-{kind}", KINDS[kind]) for kind in KINDS if kind in {part.kind for part in drawn.time}),
    )


def signed(seconds: float) -> str:
    """A duration that may be negative: what ranks that share cores save."""
    return f"-{duration(-seconds)}" if seconds < 0 else duration(seconds)


def schedule_words(schedule: Schedule) -> str:
    """``fill 1.2 s, stages idle 7.7 % of the time``: until the last stage starts, and all the time without work, while
    a bar of the step has the bubble of equal stages alone."""
    last = [slot.start_s for slot in schedule.slots if slot.stage == schedule.stages - 1]
    return (
        f"fill {duration(min(last, default=0.0))}, stages idle {percent(1 - schedule.busy_share)} of the time "
        "(bubble and uneven stages)"
    )


def schedule_figure(schedule: Schedule, step_time_s: float) -> Figure:
    """The pipeline of one step: who works on which micro-batch when."""
    shown, of = schedule.shown_micro_batches, schedule.micro_batches
    drawn = f"all {_batches(of)}" if shown >= of else f"{shown} of {_batches(of)}, the steady state cut short"
    said = (
        f"{schedule.name} over {counted(schedule.stages, 'stage')}: {schedule_words(schedule)}, mean of all stages. "
        f"Slot by slot the pipeline takes {duration(schedule.simulated_s)}; the estimate of the whole step is "
        f"{duration(step_time_s)}."
    )
    chunks = max((slot.chunk for slot in schedule.slots), default=0) + 1
    shades = (
        f", letters chunks of the model, {_letter(0)} to {_letter(chunks - 1)}; slots of every second chunk are pale"
        if chunks > 1
        else "; pale slots belong to a stage's warm-up and cool-down, strong ones to its steady state"
    )
    shape = f"Drawn: {drawn}. Numbers, where there is room, are micro-batches{shades}; in hatched time a stage is idle."
    kinds = [kind for kind in WORK if any(slot.kind == kind for slot in schedule.slots)]
    rows = []
    for stage in range(schedule.stages):
        mine = [slot for slot in schedule.slots if slot.stage == stage]
        busy = {kind: sum(s.end_s - s.start_s for s in mine if s.kind == kind) for kind in kinds}
        first, last = min((s.start_s for s in mine), default=0.0), max((s.end_s for s in mine), default=0.0)
        in_flight = sum(s.phase == "warm-up" and s.kind == "forward" for s in mine)
        rows.append(
            (str(stage), duration(first), str(in_flight), *(duration(busy[kind]) for kind in kinds), duration(last))
        )
    columns = ", ".join(
        [">stage", ">starts at", ">forward slots of warm-up", *(f">{WORK[k]}" for k in kinds), ">ends at"]
    )
    title = "Drawn slots of each stage, est."
    legend = (*(Mark(f"slot-{kind}", WORK[kind]) for kind in kinds), Mark("bubble", "idle"))
    data = table(title, columns, rows)
    return Figure(
        "schedule", "The pipeline of a step", f"{said} {shape}", data, legend, f"{said} In the table: {drawn}."
    )


def _letter(chunk: int) -> str:
    """``a`` for chunk 0, ``aa`` behind ``z``."""
    return (_letter(chunk // 26 - 1) if chunk >= 26 else "") + chr(ord("a") + chunk % 26)


def _batches(number: int) -> str:
    return f"{number:,} micro-batch" + ("" if number == 1 else "es")


def traffic_figure(drawn: Pictures) -> Figure:
    """What one GPU sends in a step, by group and the slowest link on the way."""
    traffic = drawn.topology.traffic
    most = max(traffic, key=lambda item: item.sent_bytes_per_gpu)
    exposed = sum(item.exposed_s for item in traffic)
    caption = (
        f"What one GPU sends in a step. The most is for {axis_name(most.axis)} groups ({most.what}): "
        f"{gib(most.sent_bytes_per_gpu)} over the {LEVELS[most.level]}. Of all traffic {duration(exposed)} of the step "
        "are not hidden behind work."
    )
    rows = [
        (
            axis_name(item.axis),
            item.what,
            LEVELS[item.level],
            gib(item.sent_bytes_per_gpu),
            duration(item.exposed_s),
        )
        for item in traffic
    ]
    used = {item.level for item in traffic}
    return Figure(
        "traffic",
        "Traffic by link",
        caption,
        table("Traffic of one GPU in a step, est.", "group, what, slowest link, >sent, >not hidden", rows),
        tuple(Mark(f"level-{level}", LEVELS[level]) for level in LEVELS if level in used),
    )


def axis_name(name: str) -> str:
    """``TP``, ``DP x CP``: axes as people write them."""
    return " x ".join(axis.upper() for axis in name.split(" x "))


def topology_words(drawn: Pictures) -> str:
    """How many GPUs and nodes there are, and which groups leave a node."""
    place = drawn.topology
    words = f"{counted(place.nodes * place.gpus_per_node, 'GPU')} on {counted(place.nodes, 'node')}."
    if len(place.shown_nodes) < place.nodes:
        words += f" Drawn are {counted(len(place.shown_nodes), 'node')}, the first ones and the last."
    if place.domain_gpus < place.built_domain_gpus < place.nodes * place.gpus_per_node:
        words += (
            f" Fast links join {place.built_domain_gpus} GPUs; a job over several such domains is counted with "
            f"{place.domain_gpus} in each, as schedulers fill them."
        )
    inside = [axis_name(axis.name) for axis in place.axes if axis.nodes <= 1]
    across = [f"{axis_name(axis.name)} ({axis.nodes:,} nodes)" for axis in place.axes if axis.nodes > 1]
    if inside:
        words += f" Inside a node: {', '.join(inside)}."
    if across:
        words += f" Across nodes: {', '.join(across)}."
    return words


def axes_table(drawn: Pictures) -> Figure:
    """The kinds of groups; drawn as the map of ranks on nodes."""
    rows = [
        (
            axis_name(axis.name),
            str(axis.size),
            ranks_text(axis.size, axis.stride),
            str(axis.stride),
            f"{axis.nodes:,}",
            axis.shares,
        )
        for axis in drawn.topology.axes
    ]
    return Figure(
        "topology",
        "Ranks on nodes",
        topology_words(drawn),
        table("Groups", "group, >GPUs, ranks of the first, >stride, >nodes, what it shares", rows),
    )
