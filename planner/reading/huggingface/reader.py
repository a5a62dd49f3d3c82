"""accelerate's configuration file and the Trainer's arguments, together or alone, in the planner's words.

Follows accelerate 1.15 and transformers 5.23; keys that they drop without a word become findings.  What no file of
theirs holds (sequence length, attention) is read from a rendered ``plan_setup.py`` where it lies beside them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from planner.backends.stacks import chunked_loss_bytes
from planner.errors import InputError
from planner.reading.configuration import Configuration, Files, StatedStrategy
from planner.reading.deepspeed.reader import read_deepspeed
from planner.reading.huggingface import keys
from planner.reading.huggingface.fsdp import Sharding, yaml_sharding
from planner.reading.huggingface.recipes import recipe_of
from planner.reading.huggingface.training_arguments import (
    TrainerSays,
    arguments_of,
    deepspeed_file,
    find_arguments,
    find_deepspeed,
    world_size,
)
from planner.reading.huggingface.values import FALSE, Section, read_json, read_yaml, shown
from planner.specs.finding import Finding
from planner.specs.job import Precision
from planner.specs.strategy import Offload, Recompute, Schedule

PRECISIONS: Mapping[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}

GPU_TYPES = ("FSDP", "DEEPSPEED", "MULTI_GPU", "MEGATRON_LM", "NO")
"""Values of distributed_type that run on GPUs (accelerate/utils/dataclasses.py, DistributedType)."""

OTHER_TYPES = (
    "MULTI_CPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "XLA",
    "TPU",
    "MULTI_HPU",
)

SETUP_MODULE = "plan_setup.py"

_TYPE = re.compile(r"""^distributed_type\s*:|"distributed_type"\s*:""", re.M)
"""The key that accelerate insists on, at the top level of YAML or anywhere in JSON."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Processes as they are stated."""

    gpus: int | None
    gpus_per_node: int | None


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """parallelism_config; all 1 where there is none."""

    stated: bool
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    cp: int = 1
    sp: int = 1
    seq_len: int | None = None

    @property
    def size(self) -> int:
        return self.replicate * self.shard * self.tp * self.cp * self.sp


class AccelerateReader:
    """accelerate's file, with training_arguments.json, a DeepSpeed file and plan_setup.py where they are."""

    name = "accelerate"
    title = "accelerate configuration (YAML or JSON with distributed_type)"

    def recognises(self, files: Files) -> bool:
        return _find_config(files) is not None

    def read(self, files: Files) -> Configuration:
        name = _find_config(files) or next((name for name in sorted(files) if name.endswith((".yaml", ".yml"))), None)
        if name is None:
            raise InputError("there is no YAML file among these", where=", ".join(sorted(files)))
        top = _loaded(files, name)
        arguments = find_arguments({other: text for other, text in files.items() if other != name})
        says = arguments_of(files, arguments) if arguments else None
        _check_recipe(top, {other: text for other, text in files.items() if other != name})
        configuration = _read_config(top, says, files)
        return _with_setup(_collected(configuration, top, says), files)


class TrainingArgumentsReader:
    """The Trainer's arguments without accelerate's file."""

    name = "training-arguments"
    title = "Hugging Face TrainingArguments (JSON, YAML of TRL's scripts, or the flags of a launch script)"

    def recognises(self, files: Files) -> bool:
        return find_arguments(files) is not None

    def read(self, files: Files) -> Configuration:
        name = find_arguments(files) or next(
            (name for name in sorted(files) if name.endswith((".json", ".yaml", ".yml"))), None
        )
        if name is None:
            raise InputError("there is no JSON or YAML file among these", where=", ".join(sorted(files)))
        says = arguments_of(files, name)
        machines = Machines(gpus=world_size(says.section), gpus_per_node=None)
        mesh = _mesh(says.section.section("parallelism_config"), yaml_file=False)
        if says.deepspeed is not None:
            configuration = _deepspeed(says.section, says, files, machines, mesh, None)
        elif says.sharding is not None:
            configuration = _fsdp(says.section, says.sharding, says, machines, mesh, None)
        else:
            says.section.notes.add(
                "sharding-elsewhere",
                "note",
                "neither fsdp nor deepspeed is set, so nothing is sharded unless accelerate's own file says so",
                hint="give the configuration that accelerate launch was started with, too",
            )
            configuration = _replicated(says.section, says, machines, None)
            if name.endswith((".yaml", ".yml")):
                # A script's own file never says how it is launched.
                unknown = replace(configuration.strategy, zero_stage=None, shard_degree=None)
                configuration = replace(configuration, strategy=unknown)
        told = replace(configuration, format="Hugging Face TrainingArguments")
        return _with_setup(_collected(told, says.section, says), files)


def _find_config(files: Files) -> str | None:
    """The file with accelerate's marks."""
    for name in sorted(files):
        if name.endswith((".py", ".sh", ".md", ".sbatch", ".toml")):
            continue
        if _TYPE.search(files[name]):
            return name
    return None


def _loaded(files: Files, name: str) -> Section:
    """The file's mapping; accelerate takes JSON by its ending, and YAML holds JSON."""
    if name.endswith(".json"):
        values = read_json(files[name], name)
        return replace(read_yaml("a: 1", name), values=values)
    return read_yaml(files[name], name)


def _read_config(top: Section, says: TrainerSays | None, files: Files) -> Configuration:
    _refuse_elsewhere(top)
    _check_keys(top)
    _check_launch(top)
    machines = _machines(top)
    kind = _kind(top)
    mesh = _mesh(top.section("parallelism_config"), yaml_file=True)
    stated = _stated_precision(top)
    if kind == "DEEPSPEED" or (says is not None and says.deepspeed is not None):
        return _deepspeed(top, says, files, machines, mesh, stated)
    own = says.sharding if says is not None else None
    if kind == "FSDP" or own is not None:
        sharding = own or yaml_sharding(top.section("fsdp_config"))
        return _fsdp(top, sharding, says, machines, mesh, stated)
    if kind == "MEGATRON_LM":
        return _megatron(top, says, machines, stated)
    return _replicated(top, says, machines, stated)


def _check_recipe(top: Section, others: Files) -> None:
    """A tool's own file beside accelerate's: what it says of the job is not read."""
    found = recipe_of(others)
    if found is None:
        return
    name, recipe = found
    top.notes.findings.append(
        Finding(
            id="recipe-not-read",
            severity="warning",
            message=f"{name} is for {recipe.title}, which has rules of its own: it is not read",
            where=name,
            got=recipe.says(others[name]),
            hint="give what it says of model, sequence length and batch as options",
        )
    )


def _refuse_elsewhere(top: Section) -> None:
    """Files that are accelerate's but not for GPUs of one's own."""
    if "AMAZON_SAGEMAKER" in str(top.values.get("compute_environment")):
        raise InputError(
            "this configuration starts a SageMaker job",
            where=top.notes.place("compute_environment"),
            allowed="compute_environment: LOCAL_MACHINE",
            hint="give the number of GPUs and the strategy by hand: planner estimate ...",
        )
    kind = _kind(top)
    if kind not in GPU_TYPES:
        raise InputError(
            "distributed_type is for other hardware" if kind in OTHER_TYPES else "distributed_type is unknown",
            where=top.notes.place("distributed_type"),
            got=shown(top.values.get("distributed_type")),
            allowed=", ".join(GPU_TYPES),
        )


def _kind(top: Section) -> str:
    """distributed_type; an unquoted NO is a boolean in YAML."""
    return "NO" if top.values.get("distributed_type") is False else (top.word("distributed_type") or "").upper()


def _check_keys(top: Section) -> None:
    """Unknown keys: accelerate stops at those of the top level and drops nested ones."""
    for name in top.values:
        if name not in keys.CLUSTER:
            near = get_close_matches(name, keys.CLUSTER, n=1, cutoff=0.7)
            top.add(
                "unknown-key",
                "error",
                f"accelerate knows no {name} here and stops",
                name,
                hint=f"did you mean {near[0]}?" if near else "",
            )
    for name, known in keys.NESTED.items():
        prefix = keys.PREFIXES.get(name, "")
        section = top.section(name)
        for key in section.values:
            full = key if not prefix or key.startswith(prefix.rstrip("_")) else prefix + key
            if full in known:
                continue
            near = get_close_matches(full, known, n=1, cutoff=0.7)
            section.add(
                "ignored-key",
                "warning",
                f"accelerate reads no {key} and ignores it without a word",
                key,
                hint=f"did you mean {near[0]}?" if near else "",
            )


def _check_launch(top: Section) -> None:
    """Top-level values that the launcher overrides or chokes on."""
    for name, usual in (("rdzv_backend", "static"), ("same_network", False)):
        value = top.values.get(name)
        if value not in (None, usual, str(usual).lower()):
            top.add(
                "ignored-key",
                "note",
                f"accelerate launch ignores {name} in the file: its own default stays",
                name,
                hint=f"pass --{name} on the command line if you need it",
            )
    if isinstance(top.values.get("mixed_precision"), bool):
        top.add(
            "mixed-precision-word",
            "error",
            "an unquoted no is a boolean in YAML, and the launcher stops on it",
            "mixed_precision",
            allowed="'no', bf16, fp16, fp8",
            hint="write mixed_precision: 'no'",
        )
    backend = str(top.section("dynamo_config").values.get("dynamo_backend", top.values.get("dynamo_backend") or "no"))
    if backend.lower() not in ("no", "none"):
        top.notes.skip(f"dynamo_backend: {backend} (compiled blocks)")


def _stated_precision(top: Section) -> Precision | None:
    word = top.word("mixed_precision")
    if word is None:
        return None
    known = PRECISIONS.get("no" if word == "False" else word.lower())
    if known is None:
        top.add(
            "mixed-precision",
            "error",
            f"mixed_precision is {shown(word)}",
            "mixed_precision",
            allowed="no, bf16, fp16, fp8",
        )
    return known


def _machines(top: Section) -> Machines:
    """num_processes counts all nodes."""
    value = top.values.get("num_processes")
    if value is None or str(value) == "-1":
        top.notes.skip("num_processes: given on the command line")
        return Machines(gpus=1 if _kind(top) == "NO" else None, gpus_per_node=None)
    gpus, nodes = top.count("num_processes"), top.count("num_machines", 1)
    if gpus is None or nodes is None:
        return Machines(gpus=gpus, gpus_per_node=None)
    if gpus % nodes:
        top.add(
            "processes-per-node",
            "error",
            f"num_processes({gpus}) % num_machines({nodes}) = {gpus % nodes}: some of the processes never start",
            "num_processes",
            hint="num_processes is the total over all machines",
        )
        return Machines(gpus=gpus, gpus_per_node=None)
    return Machines(gpus=gpus, gpus_per_node=gpus // nodes)


def _mesh(section: Section, *, yaml_file: bool) -> Mesh:
    """The sizes; combinations that ParallelismConfig refuses become findings."""
    prefix = "parallelism_config_"
    # The Trainer's argument of that name leaves the prefix out.
    values = {key if key.startswith(prefix) or yaml_file else prefix + key: v for key, v in section.values.items()}
    config = Section(values, section.notes, section.path)

    def size(name: str) -> int:
        return config.count(f"{prefix}{name}_size", 1) or 1

    mesh = Mesh(
        stated=bool(section.values),
        replicate=size("dp_replicate"),
        shard=size("dp_shard"),
        tp=size("tp"),
        cp=size("cp"),
        sp=size("sp"),
        seq_len=config.count(f"{prefix}sp_seq_length"),
    )
    if mesh.cp > 1 and mesh.sp > 1:
        config.add(
            "context-twice",
            "error",
            f"cp_size({mesh.cp}) and sp_size({mesh.sp}) exclude each other: accelerate stops",
            f"{prefix}sp_size",
            hint="cp_size with FSDP, sp_size with DeepSpeed",
        )
    if (mesh.tp > 1 or mesh.cp > 1) and mesh.replicate > 1 and mesh.shard == 1:
        config.add(
            "replicas-with-context",
            "error",
            f"dp_replicate_size({mesh.replicate}) with dp_shard_size(1) does not go with tp or cp: accelerate stops",
            f"{prefix}dp_replicate_size",
            hint="raise dp_shard_size",
        )
    return mesh


def _fsdp(
    top: Section, sharding: Sharding, says: TrainerSays | None, machines: Machines, mesh: Mesh, stated: Precision | None
) -> Configuration:
    """FSDP: the mesh, or all processes where there is none."""
    gpus = machines.gpus
    if mesh.stated and gpus is not None and mesh.size != gpus:
        top.section("parallelism_config").notes.add(
            "world-size",
            "error",
            f"dp_replicate({mesh.replicate}) * dp_shard({mesh.shard}) * tp({mesh.tp}) * cp({mesh.cp}) * sp({mesh.sp}) "
            f"= {mesh.size}, but num_processes is {gpus}: accelerate stops",
            "parallelism_config",
            allowed=str(gpus),
        )
    if mesh.sp > 1:
        top.add("sequence-parallel-backend", "error", "sp_size needs DeepSpeed", "parallelism_config", hint="cp_size")
    if mesh.stated and mesh.size > 1 and sharding.version == 1:
        top.add(
            "parallelism-version", "error", "parallelism_config needs fsdp_version 2", "parallelism_config", allowed="2"
        )
    dp, shard = _groups(sharding, machines, mesh)
    _check_checkpointing(top, sharding, says)
    unsharded = says is not None and (says.grad_accum or 1) > 1 and not says.sync_each_batch and bool(sharding.stage)
    if unsharded and says is not None:
        says.section.add(
            "unsharded-gradients",
            "warning",
            "between micro-batches every GPU keeps the gradients of all its parameters unsharded (no_sync)",
            "gradient_accumulation_steps",
            hint='"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": true}}',
        )
    offload = None
    if sharding.offload is not None:
        offload = Offload(optimizer=1.0, parameters="cpu", device="cpu") if sharding.offload else Offload()
    return Configuration(
        format="accelerate FSDP" + (f" version {sharding.version}" if sharding.version else ""),
        backend="accelerate-fsdp",
        gpus=gpus,
        gpus_per_node=machines.gpus_per_node,
        global_batch=_global_batch(says, dp),
        precision=_precision(top, says, stated),
        strategy=_strategy(
            says,
            tp=mesh.tp,
            cp=mesh.cp,
            dp=dp,
            zero_stage=sharding.stage,
            shard_degree=1 if sharding.stage == 0 else shard,
            recompute=_either(sharding, says),
            offload=offload,
        ),
        habits={"accumulates_unsharded": True} if unsharded else {},
    )


def _groups(sharding: Sharding, machines: Machines, mesh: Mesh) -> tuple[int | None, int | None]:
    """(replicas, ranks that share one copy)."""
    if mesh.stated and mesh.size > 1:
        return mesh.replicate * mesh.shard, mesh.shard * mesh.cp
    return machines.gpus, machines.gpus_per_node if sharding.hybrid else machines.gpus


def _check_checkpointing(top: Section, sharding: Sharding, says: TrainerSays | None) -> None:
    if sharding.recompute and says is not None and says.recompute is not None and says.recompute.mode == "full":
        top.add(
            "recompute-twice",
            "error",
            "FSDP's activation checkpointing and the Trainer's are both on: the Trainer stops",
            "fsdp_config",
            hint="set gradient_checkpointing to false",
        )


def _either(sharding: Sharding, says: TrainerSays | None) -> Recompute | None:
    """FSDP's own checkpointing or the Trainer's."""
    if sharding.recompute:
        return Recompute(mode="full")
    own = None if sharding.recompute is None else Recompute()
    return says.recompute if says is not None else own


def _deepspeed(
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
    inner = Configuration(format="", backend="")
    if found is not None:
        config, where = found
        if config.get("zero_optimization") is None:
            # accelerate/utils/dataclasses.py, DeepSpeedPlugin.__post_init__
            top.notes.add(
                "zero-section",
                "error",
                f"there is no zero_optimization in {where}: accelerate stops",
                hint='write "zero_optimization": {"stage": 0 to 3}',
            )
        settled = says.settled() if says is not None else None
        inner = read_deepspeed(config, arguments=settled, where=where, gpus=counted)
    elif says is not None:
        inner = replace(inner, strategy=StatedStrategy(micro_batch=says.micro_batch, grad_accum=says.grad_accum))
    tp = inner.strategy.tp if found is not None else 1
    dp = counted // tp if counted is not None and tp is not None and counted % tp == 0 else None
    _check_sequence_ranks(top, mesh, dp)
    if mesh.cp > 1 or mesh.tp > 1:
        top.add(
            "parallelism-with-deepspeed",
            "error",
            f"cp_size({mesh.cp}) and tp_size({mesh.tp}) act with FSDP only",
            "parallelism_config",
            hint="sp_size for long sequences; tensor_parallel.autotp_size in the DeepSpeed file",
        )
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


def _check_sequence_ranks(top: Section, mesh: Mesh, dp: int | None) -> None:
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
    chosen = _precision(section, says, stated)
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


def _replicated(top: Section, says: TrainerSays | None, machines: Machines, stated: Precision | None) -> Configuration:
    """DistributedDataParallel, or one process: nothing is sharded."""
    if says is not None and (loaded := says.section.word("dtype") or says.section.word("torch_dtype")) not in (
        None,
        "auto",
        "float32",
    ):
        says.section.notes.skip(f"dtype: {loaded} (weights and optimizer in 16 bits are priced as fp32)")
    return Configuration(
        format="accelerate with DistributedDataParallel",
        backend="fsdp",
        gpus=machines.gpus,
        gpus_per_node=machines.gpus_per_node,
        global_batch=_global_batch(says, machines.gpus),
        precision=_precision(top, says, stated),
        strategy=_strategy(
            says,
            tp=1,
            cp=1,
            dp=machines.gpus,
            zero_stage=0,
            shard_degree=1,
            recompute=says.recompute if says is not None else None,
            offload=Offload(),
        ),
    )


def _megatron(top: Section, says: TrainerSays | None, machines: Machines, stated: Precision | None) -> Configuration:
    """Megatron-LM through accelerate's plugin, whose defaults are its own."""
    config = top.section("megatron_lm_config")

    def size(name: str, default: int) -> int:
        return config.count(f"megatron_lm_{name}", default) or default

    tp, pp = size("tp_degree", 1), size("pp_degree", 1)
    if "megatron_lm_context_parallel_size" not in config:
        config.add(
            "megatron-context-default",
            "warning",
            "without megatron_lm_context_parallel_size accelerate asks Megatron for context parallelism of 2",
            "megatron_lm_context_parallel_size",
            hint="write megatron_lm_context_parallel_size: 1",
        )
    cp = size("context_parallel_size", 2)
    world = tp * pp * cp
    gpus = machines.gpus
    if gpus is not None and gpus % world:
        config.notes.add(
            "world-size",
            "error",
            f"num_processes({gpus}) % (tp({tp}) * pp({pp}) * cp({cp})) = {gpus % world}",
            "megatron_lm_config",
        )
    dp = gpus // world if gpus is not None and gpus % world == 0 else None
    sharded = bool(config.truth("megatron_lm_use_distributed_optimizer", False))
    accumulated = size("num_micro_batches", 1)
    plain: Schedule = "none" if pp == 1 else "1f1b"
    strategy = StatedStrategy(
        tp=tp,
        sequence_parallel=tp > 1 and bool(config.truth("megatron_lm_sequence_parallelism", False)),
        cp=cp,
        pp=pp,
        vpp=1,
        pipeline_schedule=plain,
        ep=size("expert_model_parallel_size", 1),
        etp=size("expert_tensor_parallel_size", 1),
        dp=dp,
        zero_stage=1 if sharded else 0,
        shard_degree=1 if not sharded else None if dp is None else dp * cp,
        micro_batch=says.micro_batch if says is not None else None,
        grad_accum=accumulated,
        recompute=_megatron_recompute(config),
        offload=Offload(optimizer=1.0, device="cpu")
        if config.truth("megatron_lm_optimizer_cpu_offload", False)
        else Offload(),
    )
    micro = strategy.micro_batch
    return Configuration(
        format="accelerate with Megatron-LM",
        backend="megatron",
        gpus=gpus,
        gpus_per_node=machines.gpus_per_node,
        global_batch=micro * accumulated * dp if micro and dp else None,
        precision=_precision(top, says, stated),
        strategy=strategy,
    )


def _megatron_recompute(config: Section) -> Recompute | None:
    """The plugin asks for full recomputation of every layer unless told otherwise."""
    if config.truth("megatron_lm_recompute_activations", False):
        config.add(
            "ignored-key",
            "warning",
            "accelerate reads megatron_lm_recompute_activations and gives it to nobody",
            "megatron_lm_recompute_activations",
            hint="megatron_lm_recompute_granularity: selective is what it means in Megatron-LM",
        )
    granularity = (config.word("megatron_lm_recompute_granularity") or "full").lower()
    if granularity == "selective":
        return Recompute(mode="selective", modules=("core_attn",))
    if granularity in ("none", "null"):
        return Recompute()
    method = (config.word("megatron_lm_recompute_method") or "uniform").lower()
    if granularity != "full" or method != "uniform":
        config.notes.skip(f"megatron_lm_recompute_granularity: {granularity}, method {method}")
        return None
    if "megatron_lm_recompute_granularity" not in config:
        config.add(
            "megatron-recompute-default",
            "note",
            "accelerate asks Megatron for full recomputation where nothing is said",
            "megatron_lm_recompute_granularity",
        )
    return Recompute(mode="full")


PLAIN: dict[str, Any] = {
    "sequence_parallel": False,
    "pp": 1,
    "vpp": 1,
    "pipeline_schedule": "none",
    "ep": 1,
    "etp": 1,
}
"""What neither kind has."""


def _strategy(says: TrainerSays | None, **fields: Any) -> StatedStrategy:
    return StatedStrategy(
        **PLAIN,
        micro_batch=says.micro_batch if says is not None else None,
        grad_accum=says.grad_accum if says is not None else None,
        **fields,
    )


def _global_batch(says: TrainerSays | None, dp: int | None) -> int | None:
    if says is None or not (says.micro_batch and says.grad_accum and dp):
        return None
    return says.micro_batch * says.grad_accum * dp


def _precision(top: Section, says: TrainerSays | None, stated: Precision | None) -> Precision | None:
    """The Trainer's bf16 and fp16 win over the launcher's word (training_args.py, mixed_precision)."""
    own = PRECISIONS[says.precision] if says is not None and says.precision is not None else None
    if own is not None and stated is not None and own != stated:
        top.add(
            "precision-mismatch",
            "warning",
            f"mixed_precision is {stated}, but the Trainer's arguments say {own}, which wins",
            "mixed_precision",
            hint="say the same in both",
        )
    return own or stated or ("fp32" if says is not None else None)


LIGER = {"loss_bytes_per_logit": chunked_loss_bytes}
"""Liger splits the tokens into about vocab / hidden parts, four to forty of them (liger_kernel/ops,
fused_linear_cross_entropy); priced as eight."""


def _collected(configuration: Configuration, top: Section, says: TrainerSays | None) -> Configuration:
    """Findings of all files, those of accelerate's file first."""
    notes = [top.notes]
    if says is not None and says.section.notes is not top.notes:
        notes.append(says.section.notes)
    return replace(
        configuration,
        whole_copies=_whole_copies(configuration, top),
        seq_len=configuration.seq_len or (says.seq_len if says is not None else None),
        model_name=configuration.model_name or (says.model_name if says is not None else None),
        task=configuration.task or (says.task if says is not None else None),
        habits={**configuration.habits, **(LIGER if says is not None and says.loss_in_parts else {})},
        findings=(*(finding for note in notes for finding in note.findings), *configuration.findings),
        unread=tuple(dict.fromkeys([*(text for note in notes for text in note.unread), *configuration.unread])),
    )


_LOADERS = ("fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading", "zero3_init_flag")
"""Switches without which every process reads all weights, although they are sharded afterwards."""


def _whole_copies(configuration: Configuration, top: Section) -> bool:
    """Whether from_pretrained runs to its end in every process: a loader that is switched off, or nothing to split."""
    sections = (top.values.get(name) for name in ("fsdp_config", "deepspeed_config"))
    said = [section.get(name) for section in sections if isinstance(section, Mapping) for name in _LOADERS]
    stage = configuration.strategy.zero_stage or 0
    split = stage == 3 or (stage > 0 and "deepspeed" not in configuration.backend)
    return not split or any(str(value).lower() in FALSE for value in said if value is not None)


def _with_setup(configuration: Configuration, files: Files) -> Configuration:
    """Sequence length and attention from the constants of ``plan_setup.py``."""
    name = next((name for name in sorted(files) if name.rsplit("/", 1)[-1] == SETUP_MODULE), None)
    if name is None:
        return configuration
    constants = _constants(files[name])
    length, attention = constants.get("SEQ_LEN"), constants.get("ATTENTION")
    return replace(
        configuration,
        seq_len=length if isinstance(length, int) and length > 0 else configuration.seq_len,
        flash_attention=attention != "eager" if isinstance(attention, str) else configuration.flash_attention,
    )


def _constants(text: str) -> dict[str, Any]:
    """Module-level names with literal values; nothing of the file is run."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {
        target.id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
