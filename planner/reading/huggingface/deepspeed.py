"""DeepSpeed under accelerate: whose settings count, and the ranks that accelerate adds to them.

The settings are read as DeepSpeed's own; findings are for what accelerate refuses or does not pass on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.reading.configuration import Configuration, Files, StatedStrategy
from planner.reading.deepspeed.reader import read_deepspeed
from planner.reading.huggingface import keys
from planner.reading.huggingface.launch import PRECISIONS, Machines, Mesh
from planner.reading.huggingface.strategies import PLAIN, settled_precision
from planner.reading.huggingface.training_arguments import TrainerSays, deepspeed_file, find_deepspeed
from planner.reading.huggingface.values import Section, shown
from planner.specs.job import Precision


def with_deepspeed(
    top: Section,
    says: TrainerSays | None,
    files: Files,
    machines: Machines,
    mesh: Mesh,
    stated: Precision | None,
) -> Configuration:
    """DeepSpeed's own settings, wherever they stand, with the ranks that accelerate adds."""
    section = top.section("deepspeed_config")
    found = _deepspeed_settings(top, section, says, files, stated)
    gpus = machines.gpus
    counted = gpus // mesh.sp if gpus is not None and gpus % mesh.sp == 0 else None
    inner = _inner(top, found, says, counted)
    tp = inner.strategy.tp if found is not None else 1
    dp = counted // tp if counted is not None and tp is not None and counted % tp == 0 else None
    _check_mesh(top, mesh, dp)
    stage = inner.strategy.zero_stage
    whole = None if dp is None else dp * mesh.sp
    micro, accumulated = inner.strategy.micro_batch, inner.strategy.grad_accum
    return replace(
        inner,
        format="accelerate with DeepSpeed",
        backend="accelerate-deepspeed",
        gpus=gpus,
        gpus_per_node=machines.gpus_per_node,
        seq_len=mesh.seq_len or (says.seq_len if says is not None else None),
        global_batch=micro * accumulated * dp if micro and accumulated and dp else None,
        precision=inner.precision if found is not None or says is None else PRECISIONS.get(says.precision or ""),
        strategy=replace(
            inner.strategy,
            **PLAIN,
            cp=mesh.sp,
            dp=dp,
            shard_degree=1 if stage == 0 else whole if stage is not None else None,
            recompute=says.recompute if says is not None else None,
        ),
    )


def _inner(
    top: Section, found: tuple[Mapping[str, Any], str] | None, says: TrainerSays | None, gpus: int | None
) -> Configuration:
    """The settings as DeepSpeed's own reader takes them; without them, what the Trainer says of the batch."""
    if found is None:
        unknown = StatedStrategy()
        batch = unknown if says is None else replace(unknown, micro_batch=says.micro_batch, grad_accum=says.grad_accum)
        return Configuration(format="", backend="", strategy=batch)
    config, where = found
    if config.get("zero_optimization") is None:
        # accelerate/utils/dataclasses.py, DeepSpeedPlugin.__post_init__
        top.notes.add(
            "zero-section",
            "error",
            f"there is no zero_optimization in {where}: accelerate stops",
            hint='write "zero_optimization": {"stage": 0 to 3}',
        )
    return read_deepspeed(config, arguments=None if says is None else says.settled(), where=where, gpus=gpus)


def _check_mesh(top: Section, mesh: Mesh, dp: int | None) -> None:
    """accelerate skips the product for Ulysses and derives DeepSpeed's batch from the two data-parallel sizes."""
    if mesh.sp > 1 and dp is not None and mesh.replicate * mesh.shard != dp:
        top.add(
            "sequence-parallel-product",
            "error",
            f"dp_replicate_size({mesh.replicate}) * dp_shard_size({mesh.shard}) must be "
            f"num_processes / sp_size = {dp}; "
            "accelerate does not check that, and DeepSpeed then stops over its batch",
            "parallelism_config",
            allowed=str(dp),
        )
    if mesh.cp > 1 or mesh.tp > 1:
        top.add(
            "parallelism-with-deepspeed",
            "error",
            f"cp_size({mesh.cp}) and tp_size({mesh.tp}) act with FSDP only",
            "parallelism_config",
            hint="sp_size for long sequences; tensor_parallel.autotp_size in the DeepSpeed file",
        )


def _deepspeed_settings(
    top: Section, section: Section, says: TrainerSays | None, files: Files, stated: Precision | None
) -> tuple[Mapping[str, Any], str] | None:
    """The configuration that counts: the Trainer's, else the file, else the keys in accelerate's own section."""
    name = section.word("deepspeed_config_file")
    if name is not None:
        _check_beside_file(top, section)
    _check_pdsh(top, section)
    if says is not None and says.deepspeed is not None:
        found = deepspeed_file(says, files)
        if found is None:
            says.section.notes.skip(f"deepspeed: {shown(says.deepspeed)} (the file is not given)")
        return found
    if name is None:
        return _inline(section, stated, says), section.notes.place("deepspeed_config")
    found = find_deepspeed(name, files)
    if found is None:
        section.add(
            "deepspeed-file-missing",
            "warning",
            f"stage, offload and precision stand in {name}, which is not given",
            "deepspeed_config_file",
            hint="give that file, too",
        )
        top.notes.skip(f"deepspeed_config_file: {name}")
    return found


def _check_beside_file(top: Section, section: Section) -> None:
    refused = [key for key in keys.BESIDE_DEEPSPEED_FILE if key in section]
    refused += ["mixed_precision"] if "mixed_precision" in top else []
    for key in refused:
        (top if key == "mixed_precision" else section).add(
            "beside-deepspeed-file",
            "error",
            f"accelerate refuses {key} beside deepspeed_config_file",
            key,
            hint="say it in the DeepSpeed file",
        )


def _check_pdsh(top: Section, section: Section) -> None:
    launcher = (section.word("deepspeed_multinode_launcher") or "pdsh").lower()
    if (top.count("num_machines", 1) or 1) > 1 and launcher == "pdsh" and "deepspeed_hostfile" not in section:
        top.notes.add(
            "deepspeed-launcher",
            "warning",
            "several machines start through pdsh, which needs a hostfile and ssh between them",
            "deepspeed_config",
            hint="deepspeed_multinode_launcher: standard starts torchrun on every machine",
        )


def _inline(section: Section, stated: Precision | None, says: TrainerSays | None) -> dict[str, Any]:
    """What DeepSpeedPlugin builds from accelerate's own keys (accelerate/utils/dataclasses.py)."""
    devices = {name: section.word(f"offload_{name}_device") or "none" for name in ("optimizer", "param")}
    for name, device in devices.items():
        if device == "nvme":
            section.add(
                "nvme-path",
                "error",
                "accelerate launch does not pass the NVMe path on to the processes",
                f"offload_{name}_nvme_path",
                hint="use deepspeed_config_file with nvme_path",
            )
    chosen = settled_precision(section, says, stated)
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": section.values.get("gradient_accumulation_steps") or "auto",
        "zero_optimization": {
            "stage": section.count("zero_stage", 2, least=0),
            "offload_optimizer": {"device": devices["optimizer"]},
            "offload_param": {"device": devices["param"]},
        },
        "bf16": {"enabled": chosen in ("bf16", "fp8")},
        "fp16": {"enabled": chosen == "fp16"},
    }
