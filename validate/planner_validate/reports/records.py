"""A validation run as one measured record, appended to the user's own file for `planner accuracy` and `planner
calibrate`."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from planner.errors import InputError
from planner.specs.measurement import (
    Measured,
    MeasuredConfiguration,
    MeasuredHardware,
    MeasuredMla,
    MeasuredModel,
    MeasuredMoe,
    MeasuredRun,
    MeasuredSource,
)
from planner.specs.model import ModelSpec
from planner.specs.problems import shown
from planner.specs.strategy import Recompute
from planner.specs.validation import ValidationReport
from planner.units import GIB
from planner_validate.reports.comparison import memory_figure

OPTION = "--record"
SOURCE = "validate"


def record_of(report: ValidationReport) -> MeasuredRun | None:
    """The run as a record; None where it did not measure a whole step of the whole plan."""
    step, strategy, cluster = report.step_time, report.strategy, report.request.cluster
    if report.mode not in ("run", "framework") or step is None or step.measured is None or report.failures:
        return None
    tokens = strategy.global_batch * strategy.seq_len
    peak = report.peak_memory
    return MeasuredRun(
        id=f"{SOURCE}/{report.plan_id[:12]}-{report.created}",
        source=MeasuredSource(title="planner validate", date=report.created[:10]),
        model=_model(report.request.model, strategy.seq_len),
        hardware=MeasuredHardware(
            gpu=cluster.accelerator.id,
            gpus=cluster.gpus,
            gpus_per_node=cluster.local_gpus,
            host_cores_per_node=cluster.host_cores_per_node,
        ),
        run=_configuration(report),
        measured=Measured(
            step_time_s=step.measured,
            tokens_per_s_per_gpu=tokens / step.measured / strategy.gpus,
            peak_mem_gib=None if peak is None or peak.measured is None else peak.measured / GIB,
            peak_mem_kind=f"{memory_figure(report.ranks)}, worst rank" if report.ranks else None,
            oom=False,
        ),
    )


def _model(model: ModelSpec, seq_len: int) -> MeasuredModel:
    moe, mla = model.moe, model.mla
    return MeasuredModel(
        name=model.name,
        layers=model.layers,
        hidden=model.hidden,
        ffn=model.ffn,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab=model.vocab,
        seq_len=seq_len,
        tied_embeddings=model.tied,
        gated_mlp=model.gated_mlp,
        position=model.position,
        qk_norm=model.qk_norm != "none",
        moe=None
        if moe is None
        else MeasuredMoe(
            experts=moe.experts,
            top_k=moe.top_k,
            expert_ffn=moe.expert_ffn,
            shared_ffn=moe.shared_ffn,
            moe_layers=sum("moe" in kind for kind in model.layer_kinds()) or None,
        ),
        mla=None if mla is None else MeasuredMla(**{name: getattr(mla, name) for name in MeasuredMla.model_fields}),
    )


def _configuration(report: ValidationReport) -> MeasuredConfiguration:
    s = report.strategy
    extra: dict[str, Any] = {"layers_per_stage": list(s.layers_per_stage), "versions": report.environment.versions}
    if s.zero_stage:
        extra["fsdp_size"] = s.shard_degree
    if s.pp > 1:
        extra["pp_schedule"] = s.pipeline_schedule
    return MeasuredConfiguration(
        framework=report.request.backend,
        version=report.environment.versions.get("torch"),
        precision=s.precision,
        tp=s.tp,
        sequence_parallel=s.sequence_parallel,
        pp=s.pp,
        vpp=s.vpp,
        cp=s.cp,
        ep=s.ep,
        etp=s.etp,
        dp=s.dp,
        zero=s.zero_stage,
        micro_batch=s.micro_batch,
        global_batch=s.global_batch,
        recompute=_recompute(s.recompute),
        flash_attention=report.request.job.flash_attention,
        extra=extra,
    )


def _recompute(recompute: Recompute) -> str:
    if recompute.mode == "full" and recompute.layers_per_stage is not None:
        return f"full:{max(recompute.layers_per_stage)}-layers"
    return recompute.mode


def append(report: ValidationReport, path: Path) -> bool:
    """Add the run to a file, whole or not at all; False where there is nothing to add."""
    record = record_of(report)
    if record is None:
        return False
    line = record.model_dump_json(exclude_none=True).encode() + b"\n"
    try:
        _append(path, line)
    except (OSError, ValueError) as problem:
        raise InputError(
            f"the record could not be added: {getattr(problem, 'strerror', None) or problem}",
            where=OPTION,
            got=shown(str(path)),
            hint="choose a place that you may write to, with free space",
        ) from problem
    return True


def _append(path: Path, line: bytes) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        before = os.lseek(handle, 0, os.SEEK_END)
        if before and os.pread(handle, 1, before - 1) != b"\n":
            line = b"\n" + line
        try:
            written = os.write(handle, line)
            if written < len(line):
                raise OSError("no space left for the whole line")
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


def check_record(path: Path) -> None:
    """Refuse a file that cannot be added to before anything is run for it."""
    try:
        folder = path.absolute().parent
        usable = path.is_file() or not path.exists()
        if path.exists():
            usable = usable and os.access(path, os.W_OK) and _holds_records(path)
        else:
            with tempfile.TemporaryFile(dir=folder):
                pass
    except (OSError, ValueError):
        usable = False
    if not usable or path.suffix != ".jsonl":
        raise InputError(
            "records cannot be added to this",
            where=OPTION,
            got=shown(str(path)),
            allowed="a .jsonl file, new or of earlier runs, in a folder that exists",
            hint="for example --record runs.jsonl",
        )


def _holds_records(path: Path) -> bool:
    """Whether the first line is one whole JSON object, as in a file of records; an empty file holds none yet."""
    with path.open("rb") as stream:
        first = next((line for line in stream if line.strip()), b"{}")
    return isinstance(json.loads(first), dict)
