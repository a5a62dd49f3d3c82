"""Number formats, offload and recomputation of a DeepSpeed configuration: what decides memory beside the degrees."""

from __future__ import annotations

from planner.reading.deepspeed import keys as known
from planner.reading.deepspeed.sections import Sections
from planner.reading.deepspeed.values import Section, shown
from planner.reading.texts.lenient_json import Path
from planner.specs.job import Precision
from planner.specs.strategy import Offload, OffloadDevice, Recompute

BF16, FP16, FP32 = ("bf16", "bfloat16"), ("fp16", "float16", "half"), ("fp32", "float32", "float")


def read_secondary(sections: Sections, stage: int | None) -> int | None:
    """GPUs of hpZ's second copy of the parameters."""
    size = sections.zero.get("zero_hpz_partition_size")
    if not size or size == 1:
        return None
    if stage != 3:
        sections.notes.add(
            "secondary-shard",
            "error",
            f"zero_hpz_partition_size({size}) has no effect at stage {stage if stage is not None else 'auto'}",
            sections.zero.at("zero_hpz_partition_size"),
            allowed="stage 3",
        )
        return None
    return int(size)


def read_recompute(sections: Sections, pp: int | None) -> Recompute | None:
    """From the constant in code, else from Hugging Face arguments; JSON alone recomputes in pipelines only."""
    mode = sections.setup.text("RECOMPUTE")
    passive = sections.top.stated("activation_checkpointing")
    if passive:
        sections.section(sections.top, "activation_checkpointing", known.ACTIVATION_CHECKPOINTING, checked=False)
    if mode in ("full", "none"):
        return Recompute(mode="full") if mode == "full" else Recompute()
    if mode is not None:
        sections.notes.add(
            "recompute",
            "error",
            f"RECOMPUTE = {shown(mode)!r} in {sections.setup.name} is neither full nor none",
            (),
            allowed="full, none",
        )
        return None
    if sections.arguments is not None:
        return Recompute(mode="full") if sections.arguments.get("gradient_checkpointing") is True else Recompute()
    if sections.pipeline.get("activation_checkpoint_interval") and (pp or 1) > 1:
        return Recompute(mode="full")
    if passive:
        sections.notes.add(
            "activation-checkpointing-passive",
            "note",
            "this section recomputes nothing by itself: it acts on models that call deepspeed.checkpointing",
            ("activation_checkpointing",),
            hint="Hugging Face models recompute after model.gradient_checkpointing_enable()",
        )
    return None


def read_offload(sections: Sections, stage: int | None) -> Offload | None:
    """What really leaves the GPU; settings without effect at this stage become findings."""
    device = _device(sections, sections.zero, "cpu_offload", sections.optimizer_offload)
    parameters = _device(sections, sections.zero, "cpu_offload_param", sections.parameter_offload)
    ratio = sections.optimizer_offload.get("ratio")
    if stage is None or device is None or parameters is None or ratio is None:
        return None
    if not 0 <= ratio <= 1:
        sections.notes.add(
            "out-of-range", "error", f"ratio({ratio:g})", sections.optimizer_offload.at("ratio"), allowed="0 to 1"
        )
        return None
    device, ratio = _effective_optimizer(sections, stage, device, ratio)
    if parameters != "none" and stage < 3:
        sections.notes.add(
            "offload-parameters",
            "error",
            f"offload_param has no effect at stage {stage}: DeepSpeed ignores it without a word",
            _offload_path(sections, "cpu_offload_param", "offload_param"),
            allowed="stage 3",
        )
        parameters = "none"
    return Offload(optimizer=ratio if device != "none" else 0.0, device=device, parameters=parameters)


def _effective_optimizer(
    sections: Sections, stage: int, device: OffloadDevice, ratio: float
) -> tuple[OffloadDevice, float]:
    path = _offload_path(sections, "cpu_offload", "offload_optimizer")
    if device == "none":
        return "none", 0.0
    if stage == 0:
        sections.notes.add(
            "offload-needs-zero",
            "error",
            "offload_optimizer has no effect at stage 0: DeepSpeed ignores it without a word",
            path,
            allowed="stages 1 to 3",
        )
        return "none", 0.0
    if stage < 3 and ratio < 1:
        sections.notes.add(
            "offload-partial",
            "error",
            f"ratio({ratio:g}) at stage {stage}: DeepSpeed offloads a part of the states at stage 3 only",
            sections.optimizer_offload.at("ratio"),
            allowed="1.0, or stage 3",
        )
        ratio = 1.0
    if stage < 3 and device == "nvme":
        sections.notes.add(
            "offload-nvme",
            "error",
            f"at stage {stage} the states go to host memory whatever the device says: only stage 3 swaps to NVMe",
            path,
            allowed="cpu, or stage 3",
        )
        device = "cpu"
    if ratio == 0:
        sections.notes.leave(sections.optimizer_offload.at("ratio"), 0.0)
        return "none", 0.0
    return device, ratio


def _offload_path(sections: Sections, old: str, new: str) -> Path:
    return sections.zero.at(new if sections.zero.stated(new) else old)


def _device(sections: Sections, zero: Section, old: str, section: Section) -> OffloadDevice | None:
    """The device as written; None where it is auto or no device."""
    if zero.values.get(old) is True:
        return "cpu"
    device = section.get("device")
    if device not in ("none", "cpu", "nvme"):
        if device is not None:
            sections.notes.add(
                "offload-device",
                "error",
                f"{shown(device)} is no device to offload to",
                section.at("device"),
                allowed="none, cpu, nvme",
            )
        return None
    if device == "nvme" and not section.stated("nvme_path"):
        sections.notes.add(
            "nvme-path",
            "error",
            "nvme_path is missing: DeepSpeed does not know which drive to swap to",
            section.at("device"),
            hint='write "nvme_path": "/local_nvme"',
        )
    checked: OffloadDevice = device
    return checked


def read_precision(sections: Sections, stage: int | None) -> Precision | None:
    """The compute format; None where it is auto or contradictory."""
    fp16, bf16 = sections.fp16.get("enabled"), sections.bf16.get("enabled")
    if fp16 is None or bf16 is None:
        return None
    if fp16 and bf16:
        sections.notes.add(
            "two-formats",
            "error",
            "fp16 and bf16 are both enabled; DeepSpeed stops with an AssertionError",
            sections.bf16.at("enabled"),
            hint="keep bf16 where the GPUs have it",
        )
        return None
    accumulation = sections.types.get("grad_accum_dtype")
    if accumulation is not None:
        _accumulation(sections, stage, str(accumulation), bool(fp16), bool(bf16))
    if bf16:
        _bf16_states(sections, stage)
        return "bf16"
    autocast = sections.top.values.get("torch_autocast", {})
    if not fp16 and autocast.get("enabled") is True:
        # fp32 weights with 16-bit multiplications, which no plan has; the section is listed as unread.
        return None
    return "fp16" if fp16 else "fp32"


def _accumulation(sections: Sections, stage: int | None, dtype: str, fp16: bool, bf16: bool) -> None:
    path = sections.types.at("grad_accum_dtype")
    name = dtype.removeprefix("torch.")
    if name not in (*BF16, *FP16, *FP32):
        sections.notes.add(
            "grad-accum-dtype", "error", f"{shown(dtype)} is no format", path, allowed="fp32, bf16, fp16"
        )
        return
    wide = name in FP32
    same = name in (FP16 if fp16 else BF16 if bf16 else FP32)
    if stage == 0 and not same:
        sections.notes.add(
            "grad-accum-dtype",
            "error",
            f"without ZeRO gradients accumulate in the format of the weights; {dtype} is not implemented",
            path,
            hint="set zero_optimization.stage to 1, or remove the key",
        )
    elif not same and not wide:
        sections.notes.leave(path, dtype)


def _bf16_states(sections: Sections, stage: int | None) -> None:
    master, states = sections.bf16.get("bf16_master_weights_and_grads"), sections.bf16.get("bf16_optimizer_states")
    if stage == 0 and (master or states):
        sections.notes.add(
            "bf16-states",
            "error",
            "bf16 master weights and states need ZeRO; DeepSpeed stops with an AssertionError",
            sections.bf16.path,
            allowed="stages 1 to 3",
        )
    elif states and not master:
        sections.notes.add(
            "bf16-states",
            "error",
            "bf16_optimizer_states needs bf16_master_weights_and_grads; DeepSpeed stops with an AssertionError",
            sections.bf16.at("bf16_optimizer_states"),
            hint="set both, or neither",
        )
