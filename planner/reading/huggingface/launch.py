"""What accelerate's own file says of the launch: hardware, processes, mesh and number format.

Keys that accelerate stops at, drops or overrides become findings here, whatever is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from planner.errors import InputError
from planner.reading.huggingface import keys
from planner.reading.huggingface.values import Section, shown
from planner.specs.job import Precision

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


def refuse_elsewhere(top: Section) -> None:
    """Files that are accelerate's but not for GPUs of one's own."""
    if "AMAZON_SAGEMAKER" in str(top.values.get("compute_environment")):
        raise InputError(
            "this configuration starts a SageMaker job",
            where=top.notes.place("compute_environment"),
            allowed="compute_environment: LOCAL_MACHINE",
            hint="give the number of GPUs and the strategy by hand: planner estimate ...",
        )
    kind = distributed_type(top)
    if kind not in GPU_TYPES:
        raise InputError(
            "distributed_type is for other hardware" if kind in OTHER_TYPES else "distributed_type is unknown",
            where=top.notes.place("distributed_type"),
            got=shown(top.values.get("distributed_type")),
            allowed=", ".join(GPU_TYPES),
            hint="use one that trains on GPUs: MULTI_GPU, FSDP or DEEPSPEED",
        )


def distributed_type(top: Section) -> str:
    """distributed_type; an unquoted NO is a boolean in YAML."""
    return "NO" if top.values.get("distributed_type") is False else (top.word("distributed_type") or "").upper()


def check_keys(top: Section) -> None:
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


def check_launch(top: Section) -> None:
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


def stated_precision(top: Section) -> Precision | None:
    """mixed_precision; an unquoted no is a boolean in YAML."""
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


def read_machines(top: Section) -> Machines:
    """num_processes counts all nodes."""
    value = top.values.get("num_processes")
    if value is None or str(value) == "-1":
        top.notes.skip("num_processes: given on the command line")
        return Machines(gpus=1 if distributed_type(top) == "NO" else None, gpus_per_node=None)
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


def read_mesh(section: Section, *, yaml_file: bool) -> Mesh:
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
