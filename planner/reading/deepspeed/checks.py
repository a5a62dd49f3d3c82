"""Settings of a DeepSpeed configuration that do not go together, and those that make its step differ from a plan's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.backends.deepspeed import overlaps_communication
from planner.backends.stacks import reduced_in_16_bits
from planner.reading.deepspeed import keys as known
from planner.reading.deepspeed.batch import MICRO, TRAIN
from planner.reading.deepspeed.degrees import Degrees
from planner.reading.deepspeed.sections import Sections
from planner.reading.deepspeed.states import FP32
from planner.reading.deepspeed.values import dotted, shown
from planner.reading.texts.lenient_json import Path
from planner.specs.finding import Severity
from planner.specs.job import Job, Precision


def check_combinations(sections: Sections, stage: int | None, degrees: Degrees, precision: Precision | None) -> None:
    """Settings that are refused together; the ids are those of the backend's rules."""
    tp, cp, pp, ep = (degrees.tp or 1, degrees.cp or 1, degrees.pp or 1, degrees.ep or 1)
    _pipeline(sections, stage, pp, precision)
    _tensor(sections, stage, tp)
    if tp > 1 and cp > 1:
        sections.notes.add(
            "context-not-with-tensor",
            "error",
            f"autotp_size({tp}) with {cp} Ulysses ranks: both redistribute the attention heads",
            sections.tensor.at("autotp_size"),
            allowed="one of them",
        )
    if sections.experts.get("enabled"):
        _expert_combinations(sections, tp, cp, pp, ep, degrees.etp or 1)
    _single_keys(sections, stage, degrees.pp or 1)


def _single_keys(sections: Sections, stage: int | None, pp: int) -> None:
    """Keys that are refused or do nothing at this stage, or in a pipeline (runtime/config.py, runtime/engine.py)."""
    top, zero = sections.top, sections.zero
    scaled = top.get("prescale_gradients") is True and zero.get("reduce_scatter") is not False
    super_offload = sections.optimizer_offload.get("super_offload") is True
    found: tuple[tuple[bool, str, Severity, Path, str, str], ...] = (
        (
            zero.get("compute_grad_norm") is False and stage in (0, 3),
            "gradient-norm",
            "error",
            zero.at("compute_grad_norm"),
            f"compute_grad_norm false is refused at stage {stage}",
            "stages 1 and 2",
        ),
        (
            top.get("gradient_allreduce_op") == "sum" and stage == 3,
            "allreduce-op",
            "error",
            ("gradient_allreduce_op",),
            "gradient_allreduce_op sum is refused at stage 3",
            "mean",
        ),
        (
            scaled and (stage or 0) >= 2,
            "prescale-gradients",
            "error",
            ("prescale_gradients",),
            "prescale_gradients is refused with ZeRO's reduce_scatter",
            "false",
        ),
        (
            top.get("managed_gradient_accumulation") is False and pp > 1,
            "managed-accumulation",
            "error",
            ("managed_gradient_accumulation",),
            "a pipeline accumulates by itself: managed_gradient_accumulation false is refused",
            "true",
        ),
        (
            super_offload and stage in (0, 1, 2),
            "super-offload",
            "error",
            sections.optimizer_offload.at("super_offload"),
            f"super_offload has no effect at stage {stage}",
            "stage 3",
        ),
        (
            zero.get("overlap_comm") is True and pp > 1,
            "overlap-with-pipeline",
            "warning",
            zero.at("overlap_comm"),
            "DeepSpeed switches overlap_comm off in a pipeline",
            "false",
        ),
    )
    for holds, id, severity, path, message, allowed in found:  # noqa: A001
        if holds:
            sections.notes.add(id, severity, message, path, allowed=allowed)


def _pipeline(sections: Sections, stage: int | None, pp: int, precision: Precision | None) -> None:
    zero = sections.zero.at("stage")
    # One stage is a PipelineModule, too.
    built = pp > 1 or sections.setup.number("PIPELINE_STAGES") is not None
    if built and stage in (2, 3):
        sections.notes.add(
            "pipeline-zero-stage",
            "error",
            f"pipeline stages({pp}) with ZeRO-{stage}: a PipelineModule refuses stages 2 and 3",
            zero,
            allowed="stage 1",
            hint="" if pp > 1 else "build the model without PipelineModule if there is one stage only",
        )
    if built and stage == 0 and precision == "bf16":
        sections.notes.add(
            "pipeline-zero-stage",
            "warning",
            "a bf16 pipeline without ZeRO runs with the sharded optimizer of stage 1 all the same",
            zero,
            hint="write stage 1, with data_types.grad_accum_dtype fp32",
        )


def _tensor(sections: Sections, stage: int | None, tp: int) -> None:
    if tp == 1:
        return
    total = sections.top.stated(TRAIN)
    if stage == 3:
        sections.notes.add(
            "tensor-zero-stage",
            "error" if total else "warning",
            f"autotp_size({tp}) with ZeRO-3: DeepSpeed refuses any {TRAIN}, which it checks with two replica counts",
            sections.zero.at("stage"),
            allowed="stages 0 to 2",
            hint=f"leave {TRAIN} out" if total else "",
        )
    elif total:
        sections.notes.add(
            "autotp-batch",
            "warning",
            f"with AutoTP DeepSpeed counts every rank as a replica: {TRAIN} is {tp} times the distinct samples",
            (TRAIN,),
            hint=f"leave {TRAIN} out",
        )


def _expert_combinations(sections: Sections, tp: int, cp: int, pp: int, ep: int, etp: int) -> None:
    """What AutoEP refuses (deepspeed/runtime/engine.py; module_inject/auto_ep_folding.py)."""
    offloaded = sections.zero.stated("offload_optimizer") or sections.zero.stated("offload_param")
    refused = (
        (etp > 1, "expert_tensor_parallel_size", f"expert_tensor_parallel_size({etp}) is reserved and must be 1"),
        (cp > 1, "autoep_size", f"AutoEP with {cp} Ulysses ranks"),
        (tp > 1 and pp > 1, "autoep_size", f"AutoEP and AutoTP with {pp} pipeline stages"),
        (tp > 1 and ep == 1, "autoep_size", "AutoEP and AutoTP need an autoep_size above 1"),
        (tp > 1 and bool(offloaded), "autoep_size", "AutoEP and AutoTP with offload"),
        ((sections.zero.get("zero_hpz_partition_size") or 1) > 1, "autoep_size", "AutoEP with zero_hpz_partition_size"),
        (bool(sections.zero.get("zero_quantized_gradients")), "autoep_size", "AutoEP with zero_quantized_gradients"),
    )
    for broken, key, message in refused:
        if broken:
            sections.notes.add("autoep", "error", f"{message}: DeepSpeed refuses it", sections.experts.at(key))


def check_optimizer(sections: Sections) -> None:
    """Numbers written as texts, and optimizers that keep other states than Adam."""
    section = sections.section(sections.top, "optimizer", known.OPTIMIZER, checked=False)
    name = section.get("type")
    if isinstance(name, str) and name.lower() not in known.ADAM_OPTIMIZERS:
        sections.notes.leave(section.at("type"), name)
    params = section.values.get("params", {})
    for key in ("lr", "eps", "weight_decay"):
        _optimizer_number(sections, params, (*section.path, "params", key))
    if "max_grad_norm" in params:
        sections.notes.add(
            "max-grad-norm",
            "error",
            "max_grad_norm is refused as a parameter of the optimizer (ValueError)",
            (*section.path, "params", "max_grad_norm"),
            hint="write gradient_clipping at the top level",
        )
    for key in ("torch_adam", "fp32_optimizer_states"):
        if key in params:
            sections.notes.leave((*section.path, "params", key), params[key])


def _optimizer_number(sections: Sections, params: Mapping[Any, Any], path: Path) -> None:
    value = params.get(path[-1])
    if value == "auto":
        if path not in sections.notes.filled:
            sections.notes.unfilled.append(path)
    elif isinstance(value, str):
        sections.notes.add(
            "wrong-type",
            "error",
            f'{path[-1]} "{shown(value)}" is a text; the optimizer computes with it and stops with a TypeError',
            path,
            allowed="a number",
            hint=f"write {shown(value)} without quotation marks",
        )


def check_arguments(sections: Sections) -> None:
    """Trainer refuses a value that differs from its own argument."""
    if sections.arguments is None:
        return
    stated: dict[Path, Any] = {
        (MICRO,): sections.top.values.get(MICRO),
        ("gradient_accumulation_steps",): sections.top.values.get("gradient_accumulation_steps"),
        ("gradient_clipping",): sections.top.values.get("gradient_clipping"),
        ("fp16", "enabled"): sections.fp16.values.get("enabled"),
        ("bf16", "enabled"): sections.bf16.values.get("enabled"),
    }
    optimizer = sections.top.values.get("optimizer", {})
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    for key in ("lr", "eps", "weight_decay"):
        value = params.get(key) if isinstance(params, Mapping) else None
        stated["optimizer", "params", key] = value if value != "auto" else None
    for path, value in stated.items():
        argument = sections.notes.filled[path]
        if value is not None and argument is not None and value != argument:
            sections.notes.add(
                "arguments-mismatch",
                "error",
                f"{dotted(path)}({shown(value)}) differs from the training argument "
                f"{known.AUTO_FILLED[tuple(map(str, path))]}({shown(argument)}); Trainer stops with a ValueError",
                path,
                hint='write "auto" here',
            )


def read_habits(sections: Sections, stage: int | None, pp: int | None, precision: Precision | None) -> dict[str, Any]:
    """Where the step runs otherwise than a plan's."""
    habits: dict[str, Any] = {}
    overlap = sections.zero.get("overlap_comm")
    if stage and (pp or 1) == 1 and overlap is not None and overlap != overlaps_communication(stage):
        planned = {s for s in range(4) if overlaps_communication(s)}
        habits["overlapped_stages"] = tuple(sorted(planned | {stage} if overlap else planned - {stage}))
    dtype = sections.top.get("communication_data_type")
    if dtype is not None:
        width = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}.get(str(dtype).lower())
        if width is None:
            sections.notes.add(
                "wrong-type",
                "error",
                f"{shown(dtype)} is no format of communication",
                ("communication_data_type",),
                allowed="fp16, bf16, fp32",
            )
        elif precision is not None and width != (4.0 if precision == "fp32" else 2.0):
            habits["gradient_reduce_bytes"] = _reduced_in_fp32 if width == 4.0 else reduced_in_16_bits
    if (pp or 1) == 1:
        habits |= _buffers(sections, stage or 0)
    if stage and precision in ("bf16", "fp16"):
        fp32 = _sums_in_fp32(sections, stage, precision)
        if fp32 != (precision == "bf16"):
            habits["accumulates_in_fp32"] = fp32
    if stage in (1, 2) and not sections.top.stated("optimizer") and sections.optimizer_offload.get("device") == "none":
        # The script brings its own optimizer, and torch's AdamW keeps the fp32 denominator of its whole partition.
        habits["optimizer_temporary"] = UNFUSED_ADAM_BYTES
        sections.notes.unread.append("optimizer: not set, so the script's own; torch's unfused AdamW is assumed")
    _default_buffers(sections, stage)
    return habits


def _sums_in_fp32(sections: Sections, stage: int, precision: Precision) -> bool:
    """deepspeed/runtime/engine.py, get_data_types: without data_types.grad_accum_dtype it is the weights' format."""
    stated = sections.types.get("grad_accum_dtype")
    wide = stated is not None and str(stated).removeprefix("torch.") in FP32
    if precision == "bf16" and not wide:
        sections.notes.add(
            "bf16-accumulation",
            "note",
            "gradients of bf16 weights are summed in bf16, over micro-batches and ranks: small ones are rounded away",
            sections.types.at("grad_accum_dtype") if stated is not None else (),
            hint='write "data_types": {"grad_accum_dtype": "fp32"}'
            + ("; that takes 4 bytes more for every parameter that a GPU holds" if stage == 1 else ""),
        )
    return wide


UNFUSED_ADAM_BYTES = 4.0
"""torch.optim.AdamW in its for-each and single-tensor forms: sqrt(exp_avg_sq) of every parameter that is updated."""


def _buffers(sections: Sections, stage: int) -> dict[str, Any]:
    """Sizes of the buffers as the file has them (auto without its arguments: as plans write them)."""
    found: dict[str, Any] = {}
    bucket, live = sections.zero.get("reduce_bucket_size"), sections.zero.get("stage3_max_live_parameters")
    if stage >= 1 and isinstance(bucket, int):
        found["reduce_bucket"] = float(bucket)
        if stage < 3 and sections.zero.get("overlap_comm") and sections.zero.get("contiguous_gradients"):
            # deepspeed/runtime/zero/stage_1_and_2.py: a second bucket fills while the first is reduced.
            found["reduce_buckets"] = 2
    if stage == 3 and isinstance(live, int):
        found["gathered_parameters"] = float(live)
    return found


def _default_buffers(sections: Sections, stage: int | None) -> None:
    """Buffers that are large because nobody set them."""
    sizes = {"reduce_bucket_size": 1, "allgather_bucket_size": 1, "stage3_max_live_parameters": 3}
    stated = {name for name in sections.zero.raw if sections.zero.stated(name)}
    missing = [
        size
        for size, first in sizes.items()
        if (stage or 0) >= first and not stated & {size, size.removeprefix("stage3_")}
    ]
    if missing:
        sections.notes.add(
            "default-buffers",
            "note",
            "not set, so DeepSpeed's large defaults hold (1 GB a bucket in 16 bits, 2 GB gathered at stage 3): "
            + ", ".join(missing),
            sections.zero.path,
            hint="hidden size squared is enough for a bucket",
        )


def _reduced_in_fp32(_job: Job) -> float:
    return 4.0
