"""Degrees of parallelism of a DeepSpeed configuration: from JSON, from constants in code, from GPUs and batch sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.reading.deepspeed.batch import Batch
from planner.reading.deepspeed.sections import Sections


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """As in StatedStrategy; None where nothing says."""

    tp: int | None
    cp: int | None
    pp: int | None
    ep: int | None
    etp: int | None
    dp: int | None = None
    gpus: int | None = None


def read_stage(sections: Sections) -> int | None:
    """The ZeRO stage, 0 where nothing is said."""
    stage = sections.zero.get("stage")
    if stage is not None and not 0 <= stage <= 3:
        sections.notes.add(
            "zero-stage", "error", f"there is no ZeRO stage {stage}", sections.zero.at("stage"), allowed="0, 1, 2, 3"
        )
        return None
    return stage if isinstance(stage, int) else None


def read_degrees(sections: Sections, stage: int | None) -> Degrees:
    """Degrees from JSON and from the constants in code, and how many replicas fill the GPUs."""
    tp, cp, pp = _tensor_ranks(sections), _sequence_ranks(sections), _stages(sections, stage)
    ep = etp = 1 if sections.experts.get("enabled") is not None else None
    if sections.experts.get("enabled"):
        ep, etp = sections.experts.get("autoep_size"), sections.experts.get("expert_tensor_parallel_size")
        ep, etp = ep or None, etp or None
    if not sections.setup.name and sections.arguments is None and pp is None:
        sections.notes.add(
            "code-decides",
            "note",
            "pipeline stages and Ulysses ranks are set in Python code, not here: one of each is assumed",
            (),
            hint="give parallel_setup.py, too, if a plan was rendered",
        )
    degrees = Degrees(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, gpus=sections.machines.gpus)
    within = (tp or 1) * (cp or 1) * (pp or 1)
    stated = sections.setup.number("DATA_PARALLEL")
    gpus = degrees.gpus
    if gpus is None:
        return replace(degrees, dp=stated, gpus=stated * within if stated else None)
    if gpus % within or (stated is not None and stated * within != gpus):
        product = f"tp({tp or 1}) * cp({cp or 1}) * pp({pp or 1})" + (f" * dp({stated})" if stated else "")
        sections.notes.add(
            "gpus-not-divisible",
            "error",
            f"{product} = {within * (stated or 1)} does not fill {gpus} GPU{'s' if gpus > 1 else ''}",
            (),
            allowed="degrees whose product is the number of GPUs, or divides it where dp is open",
        )
        return replace(degrees, dp=stated)
    return replace(degrees, dp=gpus // within)


def _tensor_ranks(sections: Sections) -> int | None:
    size = sections.tensor.get("autotp_size")
    stated = sections.setup.number("TENSOR_RANKS")
    size = 1 if size == 0 else size
    if stated is not None and size is not None and stated != size:
        sections.notes.add(
            "tensor-ranks-contradict",
            "error",
            f"TENSOR_RANKS({stated}) in {sections.setup.name} and autotp_size({size}) contradict each other",
            sections.tensor.at("autotp_size"),
            hint="write the same number in both",
        )
    return size if isinstance(size, int) else None


def _sequence_ranks(sections: Sections) -> int | None:
    stated = sections.setup.number("SEQUENCE_RANKS")
    here = sections.top.values.get("sequence_parallel_size")
    if stated is not None and here and here != stated:
        sections.notes.add(
            "sequence-ranks-contradict",
            "error",
            f"SEQUENCE_RANKS({stated}) in {sections.setup.name} and sequence_parallel_size({here}) differ",
            ("sequence_parallel_size",),
            hint="write the same number in both",
        )
    if stated is not None:
        return stated
    if here:
        return int(here)
    return 1 if sections.setup.name else None


def _stages(sections: Sections, stage: int | None) -> int | None:
    """Stages from code; the number in JSON has no effect but says what its author believes."""
    stated = sections.setup.number("PIPELINE_STAGES")
    here = sections.pipeline.raw.get("stages")
    here = None if here in (None, "auto") else _stages_in_json(sections, here)
    if here is not None and stated != here:
        sections.notes.add(
            "pipeline-stages-ignored",
            "error" if here > 1 else "note",
            f"pipeline.stages({here}) has no effect: PipelineModule gets its stages in code",
            sections.pipeline.at("stages"),
            hint="pass num_stages or a topology to PipelineModule, and remove this key",
        )
    if stated is not None:
        return stated
    if here is not None:
        return here
    certain = sections.setup.name or sections.arguments is not None or (stage or 0) >= 2
    return 1 if certain else None


def _stages_in_json(sections: Sections, value: object) -> int | None:
    number = sections.pipeline.integer(sections.pipeline.at("stages"), value)
    return number or None


def implied(degrees: Degrees, batch: Batch) -> Degrees:
    """Replicas, and so GPUs, that three batch sizes leave no choice about."""
    if degrees.dp is not None or batch.replicas is None or degrees.gpus is not None:
        return degrees
    tp = degrees.tp or 1
    if batch.replicas % tp:
        return degrees
    dp = batch.replicas // tp
    return replace(degrees, dp=dp, gpus=dp * tp * (degrees.cp or 1) * (degrees.pp or 1))


def counted(degrees: Degrees) -> int | None:
    """Replicas as DeepSpeed counts them: ranks of one AutoTP group, too (runtime/config.py)."""
    if degrees.dp is None:
        return None
    return degrees.dp * (degrees.tp or 1)
