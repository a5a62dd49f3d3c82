"""What accelerate's readers need of a DeepSpeed configuration: batch, stage, offload, precision, with ``auto`` filled
from the Trainer's arguments.

Only what bears on a plan is read; DeepSpeed's own checks of the file belong to its own reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.reading.configuration import Configuration, StatedStrategy
from planner.reading.huggingface_values import Notes, Section, shown
from planner.specs.job import Precision
from planner.specs.strategy import Offload, OffloadDevice

MATCHED: dict[str, tuple[str, Any]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", 8),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "gradient_clipping": ("max_grad_norm", 1.0),
    "optimizer.params.lr": ("learning_rate", 5e-5),
    "optimizer.params.eps": ("adam_epsilon", 1e-8),
    "optimizer.params.weight_decay": ("weight_decay", 0.0),
    "fp16.enabled": ("fp16", False),
    "bf16.enabled": ("bf16", False),
}
"""Keys that the Trainer fills where they are auto and compares where they are not, with the argument and its default
(transformers/integrations/deepspeed.py, trainer_config_process)."""


def read_deepspeed(
    config: Mapping[str, Any], *, arguments: Mapping[str, Any] | None, where: str, gpus: int | None = None
) -> Configuration:
    """A DeepSpeed configuration; ``gpus`` are the processes that it counts as replicas, where known."""
    notes = Notes(where)
    top = Section(_filled(config, arguments, notes), notes)
    zero = top.section("zero_optimization")
    stage = zero.count("stage", 0, least=0)
    micro, accumulated = top.count("train_micro_batch_size_per_gpu"), top.count("gradient_accumulation_steps")
    total = top.count("train_batch_size")
    if total and gpus and micro and accumulated and total != micro * accumulated * gpus:
        notes.add(
            "batch-mismatch",
            "error",
            f"train_batch_size({total}) is not {micro} * {accumulated} * {gpus}: DeepSpeed stops",
            "train_batch_size",
            allowed=str(micro * accumulated * gpus),
        )
    tp = max(top.section("tensor_parallel").count("autotp_size", 1, least=0) or 1, 1)
    return Configuration(
        format="DeepSpeed configuration",
        backend="deepspeed",
        gpus=gpus,
        precision=_precision(top),
        strategy=StatedStrategy(
            tp=tp,
            zero_stage=stage,
            secondary_shard_degree=_second(zero),
            micro_batch=micro,
            grad_accum=accumulated,
            offload=_offload(zero, stage),
        ),
        findings=tuple(notes.findings),
        unread=tuple(notes.unread),
    )


def _second(zero: Section) -> int | None:
    size = zero.count("zero_hpz_partition_size", 1)
    return size if size and size > 1 else None


def _filled(config: Mapping[str, Any], arguments: Mapping[str, Any] | None, notes: Notes) -> dict[str, Any]:
    """The configuration with ``auto`` replaced; values that differ from the arguments become findings."""
    filled = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    for path, (name, default) in MATCHED.items():
        *outer, last = path.split(".")
        place: Any = filled
        for key in outer:
            place = place.get(key) if isinstance(place, dict) else None
        if not isinstance(place, dict) or place.get(last) is None:
            continue
        if arguments is None:
            if place[last] == "auto":
                notes.skip(f"{path}: auto, filled from the Trainer's arguments, which are not given")
            continue
        wanted = arguments.get(name, default)
        if place[last] == "auto":
            place[last] = wanted
        elif place[last] != wanted:
            notes.add(
                "arguments-mismatch",
                "error",
                f"{path} is {shown(place[last])}, but the Trainer's {name} is {shown(wanted)}: the Trainer stops",
                path,
                hint='write the same value, or "auto" in the DeepSpeed file',
            )
    return filled


def _precision(top: Section) -> Precision | None:
    bf16 = top.section("bf16").truth("enabled", False)
    fp16 = top.section("fp16").truth("enabled", False)
    if bf16 is None or fp16 is None:
        return None
    return "bf16" if bf16 else "fp16" if fp16 else "fp32"


def _offload(zero: Section, stage: int | None) -> Offload | None:
    """Devices of optimizer and parameters, where the stage knows them."""
    optimizer, parameters = zero.section("offload_optimizer"), zero.section("offload_param")
    devices = [_device(section) for section in (optimizer, parameters)]
    if stage is None or None in devices:
        return None
    kept = devices[0] if stage >= 1 else "none"
    ratio = optimizer.values.get("ratio", 1.0)
    share = float(ratio) if isinstance(ratio, int | float) and 0 <= ratio <= 1 else 1.0
    return Offload(
        optimizer=share if kept != "none" else 0.0,
        device=kept if share > 0 and kept is not None else "none",
        parameters=devices[1] if stage == 3 and devices[1] is not None else "none",
    )


def _device(section: Section) -> OffloadDevice | None:
    match (section.word("device") or "none").lower():
        case "none":
            return "none"
        case "cpu":
            return "cpu"
        case "nvme":
            return "nvme"
        case other:
            section.add("offload-device", "error", f"device is {shown(other)}", "device", allowed="none, cpu, nvme")
            return None
