"""nanotron's YAML configuration: the strategy and model it states, and what its loader or trainer will say to it.

The loader is strict about keys and types and lax about values, so most findings are about settings that it accepts and
that then do something else or stop the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from planner.backends.base import StateFormat
from planner.errors import InputError
from planner.reading.configuration import Configuration, Files, StatedStrategy, product
from planner.reading.nanotron.keys import (
    ADAM,
    DATA,
    DATASETS,
    OTHER_SECTIONS,
    REQUIRED_SECTIONS,
    SCHEDULER,
    SECTIONS,
    STAGE,
    TRAINER_SECTIONS,
)
from planner.reading.nanotron.model import read_model
from planner.reading.nanotron.notes import Notes, shown
from planner.reading.texts.launch_scripts import processes_per_node, scripts, sets, wrong_world_size
from planner.reading.texts.yaml_lines import YamlFile, load_yaml
from planner.specs.finding import Finding
from planner.specs.job import Precision
from planner.specs.strategy import Offload, Recompute, Schedule

PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
ENGINES: dict[str, Schedule] = {"1f1b": "1f1b", "afab": "gpipe"}
MODES = ("ALL_REDUCE", "REDUCE_SCATTER")
DEFAULT_BUCKET_MB = 25
OR_DATASETS = " or ".join(f"a section with {mark}" for mark in DATASETS)


class NanotronReader:
    """``config.yaml`` of run_train.py; launch scripts beside it are looked at for processes a node."""

    name = "nanotron-yaml"
    title = "nanotron configuration (YAML)"

    def recognises(self, files: Files) -> bool:
        return _chosen(files) is not None

    def read(self, files: Files) -> Configuration:
        file = _chosen(files) or _forced(files)
        notes = Notes(file)
        _check_sections(notes)
        parts = {
            name: notes.section(file.value[name], keys, name)
            for name, keys in SECTIONS.items()
            if file.value.get(name) is not None
        }
        return _configuration(notes, parts, files)


def _yaml_names(files: Files) -> list[str]:
    return [name for name in files if name.lower().endswith((".yaml", ".yml")) or "." not in name.rsplit("/", 1)[-1]]


def _chosen(files: Files) -> YamlFile | None:
    """The first file that has nanotron's sections."""
    for name in _yaml_names(files):
        # Reading YAML is slow, so the words come first.
        if "parallelism" not in files[name]:
            continue
        try:
            file = load_yaml(name, files[name])
        except InputError:
            continue
        if _is_nanotron(file.value):
            return file
    return None


def _is_nanotron(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("parallelism"), dict):
        return False
    model, tokens = value.get("model"), value.get("tokens")
    return (
        (isinstance(model, dict) and "model_config" in model)
        or (isinstance(tokens, dict) and "batch_accumulation_per_replica" in tokens)
        or "data_stages" in value
    )


def _forced(files: Files) -> YamlFile:
    """The only file there is, when the format was named by the user."""
    names = _yaml_names(files) or list(files)
    if not names:
        raise InputError("there is no file to read", where="files", hint="give the YAML file of run_train.py")
    file = load_yaml(names[0], files[names[0]])
    if not isinstance(file.value, dict):
        raise InputError(
            "a nanotron configuration is a mapping of sections",
            where=names[0],
            got=shown(file.value),
            allowed=", ".join((*REQUIRED_SECTIONS, *TRAINER_SECTIONS)),
            hint="name the YAML that run_train.py reads",
        )
    return file


def _check_sections(notes: Notes) -> None:
    value = notes.file.value
    known = (*SECTIONS, *OTHER_SECTIONS)
    for path in notes.file.doubled:
        notes.find("doubled-key", "warning", f"{'.'.join(map(str, path))} stands twice; the last one counts", *path)
    for name in value:
        if name not in known:
            near = get_close_matches(str(name), known, n=1, cutoff=0.6)
            notes.find(
                "unknown-key",
                "error",
                f"nanotron has no section {name}; its loader is strict",
                str(name),
                allowed=", ".join(known),
                hint=f"did you mean {near[0]}?" if near else "",
            )
    for name in (*REQUIRED_SECTIONS, *TRAINER_SECTIONS):
        if value.get(name) is None:
            who = "the loader refuses the file" if name in REQUIRED_SECTIONS else "the trainer stops without it"
            notes.find("missing-section", "error", f"section {name} is missing: {who}")
    notes.unread += [name for name in ("lighteval", "s3_upload", "profiler") if value.get(name) is not None]


def _configuration(notes: Notes, parts: dict[str, dict[str, Any]], files: Files) -> Configuration:
    parallel, tokens = parts.get("parallelism", {}), parts.get("tokens", {})
    model_part, optimizer = parts.get("model", {}), parts.get("optimizer", {})
    degrees = {
        key: _positive(notes, parallel.get(key, default), "parallelism", key)
        for key, default in {
            "tp": None,
            "pp": None,
            "dp": None,
            "context_parallel_size": 1,
            "expert_parallel_size": 1,
        }.items()
    }
    tp, pp, dp = degrees["tp"], degrees["pp"], degrees["dp"]
    cp = degrees["context_parallel_size"]
    sizes = {
        key: _positive(notes, tokens.get(key), "tokens", key)
        for key in ("sequence_length", "micro_batch_size", "batch_accumulation_per_replica", "train_steps")
    }
    micro, accumulated = sizes["micro_batch_size"], sizes["batch_accumulation_per_replica"]
    model, qwen2 = read_model(notes, model_part.get("model_config"))
    _check_stages(notes, sizes["sequence_length"])
    _check_context(notes, parts, cp, qwen2)
    _check_experts(notes, degrees["expert_parallel_size"])
    zero = _zero_stage(notes, optimizer)
    scatters = _scatters(notes, parallel)
    schedule = _schedule(notes, parallel, pp, accumulated)
    _check_queue(notes, files, tp)
    gpus = product(tp, pp, dp, cp)
    return Configuration(
        format=NanotronReader.title,
        backend="nanotron",
        model=model,
        gpus=gpus,
        gpus_per_node=processes_per_node(files),
        seq_len=sizes["sequence_length"],
        global_batch=product(micro, accumulated, dp),
        precision=_precision(notes, model_part),
        loss="eager",
        flash_attention=True,
        task=_task(notes, model_part),
        strategy=StatedStrategy(
            tp=tp,
            sequence_parallel=None if tp is None or scatters is None else tp > 1 and scatters,
            cp=cp,
            pp=pp,
            vpp=1,
            pipeline_schedule=schedule,
            ep=degrees["expert_parallel_size"],
            etp=1,
            dp=dp,
            zero_stage=zero,
            shard_degree=None if zero is None else dp if zero else 1,
            micro_batch=micro,
            grad_accum=accumulated,
            recompute=_recompute(parallel),
            offload=Offload(),
        ),
        habits=_habits(notes, parts, scatters),
        findings=(
            *notes.findings,
            *wrong_world_size(files, "tp * pp * dp * context_parallel_size", gpus, notes.file.where("parallelism")),
        ),
        unread=tuple(notes.unread),
    )


def _positive(notes: Notes, value: Any, section: str, key: str) -> int | None:
    """A count of at least one, or None with a finding."""
    if value is None:
        return None
    if int(value) >= 1:
        return int(value)
    notes.find("not-positive", "error", f"{section}.{key} is {value}", section, key, allowed="a whole number from 1 on")
    return None


def _zero_stage(notes: Notes, optimizer: Mapping[str, Any]) -> int | None:
    stage = optimizer.get("zero_stage")
    if stage is None:
        return None
    if stage not in (0, 1):
        does = "shards optimizer states only, like 1" if stage > 1 else "shards nothing, like 0"
        notes.find(
            "zero-stage",
            "error",
            f"zero_stage {stage} is accepted, but {does}: gradients and parameters are never sharded",
            "optimizer",
            "zero_stage",
            allowed="0, 1",
            hint=f"write {int(stage > 0)}",
        )
    return int(stage > 0)


def _scatters(notes: Notes, parallel: Mapping[str, Any]) -> bool | None:
    """Whether tensor parallelism scatters (sequence parallelism); None where the mode is none."""
    mode = str(parallel.get("tp_mode") or "ALL_REDUCE").upper()
    if mode not in MODES:
        notes.find(
            "tp-mode", "error", f"there is no tp_mode {mode}", "parallelism", "tp_mode", allowed=", ".join(MODES)
        )
        return None
    if mode == "ALL_REDUCE" and parallel.get("tp_linear_async_communication"):
        notes.find(
            "tp-async-mode",
            "error",
            "asynchronous tensor-parallel communication fails in the first forward pass with ALL_REDUCE",
            "parallelism",
            "tp_linear_async_communication",
            allowed="false, or tp_mode REDUCE_SCATTER",
            hint="set tp_mode: REDUCE_SCATTER",
        )
    if parallel.get("tp_recompute_allgather") is False:
        notes.unread.append("parallelism.tp_recompute_allgather")
    return mode == "REDUCE_SCATTER"


def _schedule(notes: Notes, parallel: Mapping[str, Any], pp: int | None, micro_batches: int | None) -> Schedule | None:
    engine = parallel.get("pp_engine") or "afab"
    if engine not in ENGINES:
        notes.find(
            "schedule", "error", f"there is no pp_engine {engine}", "parallelism", "pp_engine", allowed="1f1b, afab"
        )
        return None
    if engine == "afab" and pp == 1 and (micro_batches or 1) > 1:
        stated = "pp_engine: afab" if parallel.get("pp_engine") else "the default pp_engine (afab)"
        notes.find(
            "afab-without-stages",
            "warning",
            f"{stated} runs all forward passes before the first backward pass, with one stage too: activations of "
            f"{micro_batches} micro-batches are held at once, which the estimate does not count",
            "parallelism",
            "pp_engine",
            allowed="1f1b",
            hint="write pp_engine: 1f1b",
        )
    if pp is None:
        return None
    if engine == "1f1b" and micro_batches is not None and micro_batches < pp - 1:
        notes.find(
            "micro-batches-fill-pipeline",
            "error",
            f"1f1b needs batch_accumulation_per_replica({micro_batches}) of at least pp({pp}) - 1",
            "tokens",
            "batch_accumulation_per_replica",
            allowed=f"at least {pp - 1}",
            hint=f"raise batch_accumulation_per_replica to {pp - 1} or more; {4 * pp} keep the pipeline bubble small",
        )
    return ENGINES[engine] if pp > 1 else "none"


def _recompute(parallel: Mapping[str, Any]) -> Recompute:
    return Recompute(mode="full" if parallel.get("recompute_layer") else "none")


def _precision(notes: Notes, model: Mapping[str, Any]) -> Precision | None:
    dtype = model.get("dtype") or "bfloat16"
    if dtype in PRECISIONS:
        return PRECISIONS[dtype]
    notes.find("precision-bf16", "error", f"dtype {dtype} is none that trains", "model", "dtype", allowed="bfloat16")
    return None


def _task(notes: Notes, model: Mapping[str, Any]) -> Any:
    """sft where the weights of a finished model are read."""
    method = model.get("init_method")
    if "init_method" not in model:
        return None
    keys = set(method) if isinstance(method, dict) else set()
    if not ({"std"} <= keys <= {"std", "scaling_method"} or keys in ({"use_mup"}, {"path"})):
        notes.find(
            "init-method",
            "error",
            "init_method is none of nanotron's",
            "model",
            "init_method",
            allowed="{std: 0.02}, {path: checkpoint} or {use_mup: true}",
        )
        return None
    return "sft" if keys == {"path"} else "pretrain"


def _check_stages(notes: Notes, seq_len: int | None) -> None:
    stages = notes.file.value.get("data_stages")
    if stages is None:
        return
    if not isinstance(stages, list):
        notes.find("wrong-type", "error", f"data_stages is {shown(stages)}", "data_stages", allowed="a list of stages")
        return
    starts = []
    for index, entry in enumerate(stages):
        stage = notes.section(entry, STAGE, "data_stages", index)
        if stage.get("data") is not None:
            data = notes.section(stage["data"], DATA, "data_stages", index, "data")
            _check_dataset(notes, data.get("dataset"), "data_stages", index, "data", "dataset")
        starts.append(stage.get("start_training_step"))
        own = stage.get("sequence_length")
        if own is not None and seq_len is not None and own != seq_len:
            notes.find(
                "stage-sequence-length",
                "error",
                f"sequence_length {own} differs from tokens.sequence_length {seq_len}; the trainer knows one length",
                "data_stages",
                index,
                "sequence_length",
                allowed=str(seq_len),
            )
    if 1 not in starts:
        notes.find("first-stage", "error", "no data stage starts at step 1", "data_stages", allowed="one with 1")
    if len(set(starts)) < len(starts):
        notes.find("first-stage", "error", "two data stages start at the same step", "data_stages")


def _check_dataset(notes: Notes, dataset: Any, *path: str | int) -> None:
    """One of nanotron's kinds of data, and the tokenizer and vocabulary that the rest of the file has."""
    if dataset is None:
        return
    marks = [mark for mark in DATASETS if isinstance(dataset, dict) and mark in dataset]
    if len(marks) != 1:
        notes.find("dataset", "error", "dataset is none of nanotron's kinds", *path, allowed=f"null, or {OR_DATASETS}")
        return
    good = notes.section(dataset, DATASETS[marks[0]], *path)
    for key, section, other in (
        ("vocab_size", "model", "vocab_size"),
        ("tokenizer_name", "tokenizer", "tokenizer_name_or_path"),
    ):
        rest = notes.file.value.get(section)
        rest = rest.get("model_config") if section == "model" and isinstance(rest, dict) else rest
        stated = rest.get(other) if isinstance(rest, dict) else None
        if good.get(key) is not None and stated is not None and good[key] != stated:
            message = f"{key} of the dataset is {shown(good[key])}, {other} is {shown(stated)}"
            notes.find("dataset-tokenizer", "error", message, *path, key, allowed=shown(stated))


def _check_context(notes: Notes, parts: Mapping[str, Mapping[str, Any]], cp: int | None, qwen2: bool) -> None:
    """Context parallelism works in one model class, with one attention, from loaded weights and real data only."""
    if cp is None or cp == 1:
        return
    key = ("parallelism", "context_parallel_size")
    config = parts.get("model", {}).get("model_config")
    attention = config.get("_attn_implementation") if isinstance(config, dict) else None
    if not qwen2 or attention != "llama3_ring_attention":
        notes.find(
            "context-parallel-attention",
            "error",
            f"with context_parallel_size {cp} each rank would attend to its own part of the sequence only",
            *key,
            allowed="a Qwen2 model (is_qwen2_config: true) with _attn_implementation: llama3_ring_attention",
        )
    if not parts.get("checkpoints", {}).get("resume_checkpoint_path"):
        notes.find(
            "context-parallel-weights",
            "error",
            "weights cannot be created at random under context parallelism",
            *key,
            hint="save an initial state with context_parallel_size 1 and set checkpoints.resume_checkpoint_path to it",
        )
    stages = notes.file.value.get("data_stages")
    first = stages[0] if isinstance(stages, list) and stages else None
    data = first.get("data") if isinstance(first, dict) else None
    if isinstance(data, dict) and data.get("dataset") is None:
        notes.find(
            "context-parallel-data",
            "error",
            "random tokens (dataset: null) do not fit context parallelism: positions are cut, and attention needs all",
            *key,
            hint="name a real dataset",
        )


def _check_experts(notes: Notes, ep: int | None) -> None:
    if ep is not None and ep > 1:
        notes.find(
            "no-expert-parallel",
            "error",
            f"expert_parallel_size {ep} is accepted, but the rank grid then has more places than ranks",
            "parallelism",
            "expert_parallel_size",
            allowed="1",
        )


def _habits(notes: Notes, parts: Mapping[str, Mapping[str, Any]], scatters: bool | None) -> dict[str, Any]:
    """What the file sets to something else than a plan would."""
    model, optimizer, parallel = parts.get("model", {}), parts.get("optimizer", {}), parts.get("parallelism", {})
    changed: dict[str, Any] = {}
    states = _state_format(notes, optimizer)
    if states is not None:
        changed["state_format"] = states
    multiple = model.get("make_vocab_size_divisible_by", 1)
    if multiple > 1:
        changed["vocab_multiple"] = multiple
    if scatters and not parallel.get("tp_linear_async_communication"):
        changed["tensor_parallel_overlap"] = False
    if model.get("ddp_bucket_cap_mb", DEFAULT_BUCKET_MB) != DEFAULT_BUCKET_MB:
        notes.unread.append("model.ddp_bucket_cap_mb")
    if isinstance(optimizer.get("learning_rate_scheduler"), dict):
        notes.section(optimizer["learning_rate_scheduler"], SCHEDULER, "optimizer", "learning_rate_scheduler")
    return changed


def _state_format(notes: Notes, optimizer: Mapping[str, Any]) -> StateFormat | None:
    """Bytes per parameter where optimizer or accumulation differ from the plan's (bf16, fp32 accumulation, Adam)."""
    factory = optimizer.get("optimizer_factory")
    adam = not (isinstance(factory, dict) and factory.get("name") == "sgd")
    stated = notes.section(factory, ADAM, "optimizer", "optimizer_factory") if adam and factory is not None else {}
    if stated.get("torch_adam_is_fused") is False:
        notes.unread.append("optimizer.optimizer_factory.torch_adam_is_fused")
    if optimizer.get("accumulate_grad_in_fp32") is not False:
        return None if adam else StateFormat(2.0, 6.0, 4.0)
    notes.find(
        "gradients-in-16-bits",
        "warning",
        "without accumulate_grad_in_fp32 there are no fp32 weights either, and small updates are rounded away",
        "optimizer",
        "accumulate_grad_in_fp32",
        allowed="true",
    )
    return StateFormat(2.0, 2.0, 4.0 if adam else 0.0)


def _check_queue(notes: Notes, files: Files, tp: int | None) -> None:
    """Scripts that start nanotron with tensor parallelism must set the variable that its layers assert."""
    starts = [name for name, text in scripts(files).items() if "run_train.py" in text]
    if tp is None or tp == 1 or not starts or sets(files, "CUDA_DEVICE_MAX_CONNECTIONS", "1"):
        return
    notes.findings.append(
        Finding(
            id="one-hardware-queue",
            severity="error",
            message="tensor-parallel layers refuse to be built without CUDA_DEVICE_MAX_CONNECTIONS=1",
            where=starts[0],
            hint="export CUDA_DEVICE_MAX_CONNECTIONS=1 before torchrun",
        )
    )
