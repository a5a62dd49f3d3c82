"""How Megatron-LM deals layers to pipeline stages, from the arguments that say so.

Covers the layout string, counts of the first and last stage, embedding and loss counted as layers, and the even split
(megatron/core/transformer/transformer_config.py and pipeline_parallel_layer_layout.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.reading.megatron.flags import Stated
from planner.specs.finding import Finding

_MAX_LAYOUT = 100_000
"""Letters of an unrolled layout string; longer ones are not meant."""
MOST_STAGES_SHOWN = 8
"""Stages whose layers are written out one by one."""
_CHUNK_FLAGS = (
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "pipeline-model-parallel-layout",
)


@dataclass(frozen=True)
class Dealt:
    """Chunks of a rank, and the layers of each virtual stage where they follow."""

    vpp: int | None = None
    layers: tuple[int, ...] | None = None


def dealt(stated: Stated, layers: int | None, pp: int | None) -> Dealt:
    """What the arguments say; findings where the layers do not divide."""
    given = [name for name in _CHUNK_FLAGS if name in stated.values]
    if len(given) > 1:
        _refuse(
            stated,
            "virtual-stages-stated-twice",
            "only one of " + ", ".join(f"--{name}" for name in given) + " may be given",
            given,
        )
    layout = stated.text("pipeline-model-parallel-layout")
    if layout is not None:
        return _from_layout(stated, layout, layers, pp)
    if pp is None:
        return Dealt()
    chunks = _chunks(stated, layers, pp)
    if layers is None or chunks is None:
        return Dealt(chunks)
    return Dealt(chunks, _from_counts(stated, layers, pp, chunks))


def _refuse(stated: Stated, name: str, message: str, flags: list[str], hint: str = "", *, allowed: str = "") -> None:
    place = stated.place(*flags)
    stated.note(Finding(id=name, severity="error", message=message, where=place, allowed=allowed, hint=hint))


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def outer_counts(layers: int, pp: int) -> tuple[int, int] | None:
    """Layers of the first and the last stage that leave equal stages between them, none of the two larger than those:
    the most even such split; None where there is none."""
    middle = pp - 2
    if middle < 1:
        return None
    even = [
        (first, last)
        for each in range(-(-layers // pp), -(-layers // pp) + 3)
        for first in range(1, each + 1)
        if 1 <= (last := layers - middle * each - first) <= each
    ]
    # The last stage also has the head and the loss: of two equally even splits it takes the smaller share.
    return min(even, key=lambda ends: (-min(ends), abs(ends[0] - ends[1]), ends[1]), default=None)


def _split_hint(layers: int, pp: int) -> str:
    """An uneven split that works, with its flags."""
    ends = outer_counts(layers, pp)
    if ends is None:
        return "lower pp, or give --pipeline-model-parallel-layout, which takes any split"
    first, last = ends
    stages = ",".join(map(str, (first, *[(layers - first - last) // (pp - 2)] * (pp - 2), last)))
    return (
        f"or an uneven split: --decoder-first-pipeline-num-layers {first} --decoder-last-pipeline-num-layers {last} "
        f"({stages if pp <= MOST_STAGES_SHOWN else f'{first}, {(layers - first - last) // (pp - 2)} each, {last}'})"
    )


def _from_layout(stated: Stated, text: str, layers: int | None, pp: int | None) -> Dealt:
    stages = layout_stages(text)
    flag = ["pipeline-model-parallel-layout"]
    if stages is None:
        stated.bad_value(flag[0], text, "letters E, t, m, L with | between stages")
        return Dealt()
    if pp is None or len(stages) % pp:
        if pp is not None:
            _refuse(
                stated, "layout-stages", f"{len(stages)} stages in the layout % pp({pp}) = {len(stages) % pp}", flag
            )
        return Dealt()
    counts = tuple(stage.count("t") for stage in stages)
    if layers is not None and sum(counts) != layers:
        _refuse(stated, "layers-assigned", f"the layout holds {sum(counts)} layers, the model has {layers}", flag)
        return Dealt(len(stages) // pp)
    return Dealt(len(stages) // pp, counts)


def layout_stages(text: str) -> list[str] | None:
    """The letters of each virtual stage; None where the text is no layout."""
    text = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        size = sum(len(part) * int(count) for part, count in re.findall(pattern, text))
        if size > _MAX_LAYOUT:
            return None
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return None if re.search(r"[^EtmL|]", text) or not text else text.split("|")


def _outer(stated: Stated) -> tuple[int, int]:
    """Places that embedding and loss take in the split."""
    return (
        int(bool(stated.switch("account-for-embedding-in-pipeline-split"))),
        int(bool(stated.switch("account-for-loss-in-pipeline-split"))),
    )


def _chunks(stated: Stated, layers: int | None, pp: int) -> int | None:
    """Virtual stages of a rank."""
    logged = stated.integer("virtual-pipeline-model-parallel-size")
    if logged is not None and not stated.values.get("num-layers-per-virtual-pipeline-stage"):
        return logged
    chunks = stated.integer("num-virtual-stages-per-pipeline-rank")
    if chunks is not None:
        return chunks
    size = stated.integer("num-layers-per-virtual-pipeline-stage")
    if size is None:
        known = stated.complete and not any(name in stated.unresolved for name in _CHUNK_FLAGS)
        # An excerpt of a log may leave it out; a single stage has one chunk.
        return 1 if known or pp == 1 or not stated.places.keys() & set(_CHUNK_FLAGS) else None
    if layers is None:
        return None
    total = layers + sum(_outer(stated))
    if total % pp or (total // pp) % size:
        _refuse(
            stated,
            "layers-over-virtual-stages",
            f"{total} layers over pp({pp}) stages in virtual stages of {size} layers: "
            + (f"{total} % {pp} = {total % pp}" if total % pp else f"{total // pp} % {size} = {total // pp % size}")
            + f", must be 0; versions that do not check it train "
            f"{pp * (total // pp // size * size)} layers",
            ["num-layers-per-virtual-pipeline-stage"],
            _chunk_hint(total, pp),
        )
        return None
    return total // pp // size


def _chunk_hint(total: int, pp: int) -> str:
    """Virtual stages that divide evenly, with this number of stages and with half or twice as many."""
    ways = []
    for stages in (pp, pp // 2, pp * 2):
        if stages > 1 and total % stages == 0:
            counts = [n for n in range(1, total // stages + 1) if (total // stages) % n == 0]
            ways.append(f"pp({stages}) with {', '.join(map(str, counts))} virtual stages a rank")
    if not ways:
        return "give --pipeline-model-parallel-layout, which takes any split"
    return f"{total} layers divide evenly over " + "; ".join(ways)


def _from_counts(stated: Stated, layers: int, pp: int, vpp: int) -> tuple[int, ...] | None:
    """Layers of the virtual stages, dealt rank by rank in equal chunks."""
    ranks = _rank_layers(stated, layers, pp)
    if ranks is None:
        return None
    embedding, loss = _outer(stated)
    uneven = next((count for count in ranks if count % vpp), None)
    if uneven is not None:
        _refuse(
            stated,
            "layers-over-virtual-stages",
            f"{uneven} layers of a pipeline rank % {vpp} virtual stages = {uneven % vpp}, must be 0; versions that do "
            f"not check it train {sum(count // vpp * vpp for count in ranks)} of the {sum(ranks)} layers",
            ["num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"],
            _chunk_hint(layers + embedding + loss, pp),
        )
        return None
    dealt_layers = [ranks[rank] // vpp for _chunk in range(vpp) for rank in range(pp)]
    dealt_layers[0] -= embedding
    dealt_layers[-1] -= loss
    return tuple(dealt_layers) if min(dealt_layers) >= 0 else None


def _rank_layers(stated: Stated, layers: int, pp: int) -> list[int] | None:
    """Places (layers, and embedding or loss where they count) of each pipeline rank."""
    embedding, loss = _outer(stated)
    first = stated.integer("decoder-first-pipeline-num-layers")
    last = stated.integer("decoder-last-pipeline-num-layers")
    flags = ["decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "pipeline-model-parallel-size"]
    if first is None and last is None:
        total = layers + embedding + loss
        if pp > total:
            _refuse(stated, "stages-within-layers", f"pp({pp}) stages for {total} layers", flags[2:])
            return None
        if total % pp:
            _refuse(
                stated,
                "layers-over-stages",
                f"{total} layers % pp({pp}) = {total % pp}, must be 0; versions that do not check it train "
                f"{pp} * {total // pp} = {total // pp * pp} layers",
                ["pipeline-model-parallel-size"],
                _split_hint(layers, pp),
                allowed=f"pp in {_divisors(total)}",
            )
            return None
        return [total // pp] * pp
    if embedding or loss:
        _refuse(
            stated,
            "uneven-split-stated-twice",
            "counts of the first or last stage do not go with embedding or loss counted as layers",
            flags,
        )
        return None
    if pp > layers:
        _refuse(stated, "stages-within-layers", f"pp({pp}) stages for {layers} layers", flags[2:])
        return None
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < 0 or middle < 0 or bool(rest) != bool(middle) or (middle and rest % middle):
        _refuse(
            stated, "layers-over-stages", f"{rest} layers remain for {middle} stages between, must divide evenly", flags
        )
        return None
    each = rest // middle if middle else 0
    return [*([first] if first is not None else []), *[each] * middle, *([last] if last is not None else [])]
