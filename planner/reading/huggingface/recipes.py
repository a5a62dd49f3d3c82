"""Files of tools that write a framework's arguments themselves: axolotl, LLaMA-Factory, ms-swift, verl and others.

Each decides sharding, precision and batch by rules of its own that change from release to release, so none is guessed
at: the error names the tool, what to take from it, and the command that prices the same strategy.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from planner.errors import InputError
from planner.reading.configuration import Configuration, Files


@dataclass(frozen=True)
class Recipe:
    """One tool."""

    title: str
    marks: tuple[re.Pattern[str], ...]
    """All of them must be found."""
    values: tuple[tuple[str, str], ...]
    """Its settings and what they are called here."""
    instead: str
    """The file to give instead."""
    backend: str = "fsdp"
    """Whose step is the most like that of the tool."""

    def says(self, text: str) -> str:
        """The settings of a file that bear on memory or speed; what is switched off is not one of them."""
        text = _COMMENT.sub("", text)
        found = [(key, told, _value(text, key)) for key, told in self.values]
        return "; ".join(f"{key} = {value} ({told})" for key, told, value in found if value not in _OFF)


def _keys(*names: str) -> tuple[re.Pattern[str], ...]:
    """Top-level YAML keys."""
    return tuple(re.compile(rf"^{name}\s*:", re.M) for name in names)


_ACTOR = (
    "the actor alone, as a model with its batch: several models (actor, reference, critic, rollout) share these GPUs, "
    "which one plan does not describe"
)
_NEOX = (
    ("pipe-parallel-size", "--pp"),
    ("model-parallel-size", "--tp"),
    ("num-layers", "layers"),
    ("hidden-size", "width"),
    ("seq-length", "--seq-len"),
    ("train-micro-batch-size-per-gpu", "--micro-batch"),
    ("gradient-accumulation-steps", "micro-batches of a step"),
)
RECIPES = (
    Recipe(
        "axolotl",
        _keys("base_model", "(?:sequence_len|micro_batch_size)"),
        (
            ("base_model", "--model"),
            ("sequence_len", "--seq-len"),
            ("micro_batch_size", "--micro-batch"),
            ("gradient_accumulation_steps", "micro-batches of a step"),
            ("dp_replicate_size", "replicas of the shard group"),
            ("dp_shard_size", "GPUs of a shard group"),
            ("tensor_parallel_size", "tp"),
            ("context_parallel_size", "cp"),
            ("sequence_parallel_degree", "cp"),
            ("expert_parallel_size", "ep"),
            ("adapter", "task"),
            ("load_in_4bit", "4-bit weights"),
            ("load_in_8bit", "8-bit weights"),
            ("bf16", "precision"),
            ("fp16", "precision"),
            ("fp8", "precision"),
            ("gradient_checkpointing", "recomputation"),
            ("activation_offloading", "activations in host memory"),
            ("optimizer", "optimizer"),
            ("fsdp", "sharding"),
            ("fsdp_version", "FSDP"),
            ("reshard_after_forward", "ZeRO 3, else 2"),
            ("offload_params", "offload"),
            ("fsdp_offload_params", "offload"),
            ("deepspeed", "DeepSpeed file"),
        ),
        "the DeepSpeed file that it names, or training_args of a run (the Trainer's arguments as JSON) with the "
        "accelerate configuration it was launched with",
    ),
    Recipe(
        "LLaMA-Factory",
        _keys("model(?:_name_or_path)?", "(?:finetuning_type|cutoff_len)"),
        (
            ("model_name_or_path", "--model"),
            ("model", "--model"),
            ("cutoff_len", "--seq-len"),
            ("per_device_train_batch_size", "--micro-batch"),
            ("micro_batch_size", "--micro-batch"),
            ("gradient_accumulation_steps", "micro-batches of a step"),
            ("tensor_model_parallel_size", "tp"),
            ("sequence_parallel", "sequence parallelism"),
            ("pipeline_model_parallel_size", "pp"),
            ("expert_model_parallel_size", "ep"),
            ("cp_size", "cp"),
            ("ep_size", "ep"),
            ("recompute_granularity", "recomputation"),
            ("use_distributed_optimizer", "ZeRO 1"),
            ("disable_gradient_checkpointing", "no recomputation"),
            ("finetuning_type", "task"),
            ("quantization_bit", "bits of a weight"),
            ("bf16", "precision"),
            ("fp16", "precision"),
            ("pure_bf16", "no fp32 master weights"),
            ("fp8", "precision"),
            ("optim", "optimizer"),
            ("use_galore", "optimizer"),
            ("use_badam", "optimizer"),
            ("fsdp", "sharding"),
            ("deepspeed", "DeepSpeed file"),
            ("config_file", "DeepSpeed file"),
        ),
        "the DeepSpeed file that it names under deepspeed: (memory is decided there), or the accelerate configuration "
        "for FSDP",
    ),
    Recipe(
        "LLaMA-Factory",
        (re.compile(r"^[^#\n]*\bllamafactory-cli\s+train\s", re.M),),
        (
            ("--model_name_or_path", "--model"),
            ("--cutoff_len", "--seq-len"),
            ("--per_device_train_batch_size", "--micro-batch"),
            ("--gradient_accumulation_steps", "micro-batches of a step"),
            ("--finetuning_type", "task"),
            ("--deepspeed", "DeepSpeed file"),
        ),
        "the file that the command names, or the DeepSpeed file that is named there",
    ),
    Recipe(
        "verl",
        (re.compile(r"actor_rollout_ref\.\S+=|^actor_rollout_ref\s*:", re.M),),
        (
            ("actor_rollout_ref.model.path", "--model"),
            ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "tokens of a micro-batch"),
            ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "--cp"),
            ("actor_rollout_ref.actor.fsdp_config.optimizer_offload", "offload of the optimizer"),
            ("trainer.n_gpus_per_node", "GPUs of a node"),
            ("trainer.nnodes", "nodes"),
        ),
        _ACTOR,
    ),
    Recipe(
        "slime",
        (re.compile(r"^[^#\n]*--rollout-batch-size\b", re.M), re.compile(r"^[^#\n]*--hf-checkpoint\b", re.M)),
        (
            ("--hf-checkpoint", "--model"),
            ("--tensor-model-parallel-size", "--tp"),
            ("--pipeline-model-parallel-size", "--pp"),
            ("--context-parallel-size", "--cp"),
            ("--expert-model-parallel-size", "--ep"),
            ("--max-tokens-per-gpu", "tokens of a micro-batch"),
            ("--actor-num-nodes", "nodes"),
            ("--actor-num-gpus-per-node", "GPUs of a node"),
        ),
        _ACTOR,
        "megatron",
    ),
    Recipe(
        "OpenRLHF",
        (re.compile(r"^[^#\n]*\bopenrlhf[./]cli\b", re.M), re.compile(r"zero_stage")),
        (
            ("--pretrain", "--model"),
            ("--model.model_name_or_path", "--model"),
            ("--max_len", "--seq-len"),
            ("--data.max_len", "--seq-len"),
            ("--micro_train_batch_size", "--micro-batch"),
            ("--train.micro_batch_size", "--micro-batch"),
            ("--train_batch_size", "--global-batch"),
            ("--train.batch_size", "--global-batch"),
            ("--zero_stage", "--zero-stage"),
            ("--ds.zero_stage", "--zero-stage"),
        ),
        "the model that is trained, alone, with its batch",
        "deepspeed",
    ),
    Recipe(
        "DeepSpeed-Chat",
        (
            re.compile(r"^[^#\n]*--(?:actor_)?zero_stage\b", re.M),
            re.compile(r"^[^#\n]*--per_device_(?:train|training|generation)_batch_size\b", re.M),
        ),
        (
            ("--model_name_or_path", "--model"),
            ("--max_seq_len", "--seq-len"),
            ("--per_device_train_batch_size", "--micro-batch"),
            ("--gradient_accumulation_steps", "micro-batches of a step"),
            ("--zero_stage", "--zero-stage"),
            ("--actor_zero_stage", "--zero-stage"),
            ("--lora_dim", "task"),
        ),
        "the DeepSpeed configuration that its scripts make (training/utils/ds_utils.py), as JSON",
        "deepspeed",
    ),
    Recipe(
        "GPT-NeoX",
        (re.compile(r"pipe[-_]parallel[-_]size['\"]?\s*:"), re.compile(r"model[-_]parallel[-_]size['\"]?\s*:")),
        tuple((name.replace("-", mark), told) for name, told in _NEOX for mark in "-_"),
        "its DeepSpeed settings alone; layout and model stand in keys of its own, which DeepSpeed would ignore",
        "megatron",
    ),
    Recipe(
        "ms-swift",
        (re.compile(r"^(?:[^#\n]*[\s;&])?(?:swift|megatron)\s+(?:sft|pt|rlhf)\b", re.M),),
        (
            ("--model", "--model"),
            ("--max_length", "--seq-len"),
            ("--tensor_model_parallel_size", "--tp"),
            ("--pipeline_model_parallel_size", "--pp"),
            ("--context_parallel_size", "--cp"),
            ("--expert_model_parallel_size", "--ep"),
            ("--micro_batch_size", "--micro-batch"),
            ("--global_batch_size", "--global-batch"),
            ("--per_device_train_batch_size", "--micro-batch"),
            ("--recompute_granularity", "--recompute"),
            ("--tuner_type", "task"),
            ("--train_type", "task"),
            ("--deepspeed", "DeepSpeed file"),
        ),
        "the DeepSpeed file that it names under --deepspeed, or the arguments that Megatron-LM would be given",
        "megatron",
    ),
)


class RecipeReader:
    """Recognises the tools' files in order to say what to give instead."""

    name = "recipe"
    title = "files of axolotl, DeepSpeed-Chat, GPT-NeoX, LLaMA-Factory, ms-swift, OpenRLHF, slime and verl (recognised)"

    def recognises(self, files: Files) -> bool:
        return recipe_of(files) is not None

    def read(self, files: Files) -> Configuration:
        found = recipe_of(files)
        if found is None:
            raise InputError(
                "this is no file of a tool that is known here",
                where=", ".join(sorted(files)),
                allowed=", ".join(recipe.title for recipe in RECIPES),
                hint="name the configuration of the framework that the tool starts",
            )
        name, recipe = found
        values = {told: (key, value) for key, told in recipe.values if (value := _value(files[name], key))}
        raise InputError(
            f"this file is for {recipe.title}, which chooses sharding, precision and batch by rules of its own",
            where=name,
            got=recipe.says(files[name]) or None,
            allowed=recipe.instead,
            hint=_command(recipe.backend, {told: value for told, (_, value) in values.items()}),
        )


def _command(backend: str, values: Mapping[str, str]) -> str:
    """What to ask instead, with the values that have an option; adapters are said not to be planned."""
    file = values.get("DeepSpeed file", "")
    asked = ("check", file) if file else ("estimate", "--backend", backend)
    model = values.get("--model", "$").rpartition("/")[2]
    known = [
        told for told in values if told.startswith("--") and told != "--model" and (told == "--seq-len" or not file)
    ]
    options = [(told, values[told]) for told in known if values[told].isdecimal()]
    words = [*asked, "--model", "MODEL" if "$" in model else model, *chain(*options), "--gpu", "GPU", "--gpus", "N"]
    command = shlex.join(["planner", *words])
    task = values.get("task", "full")
    adapters = "" if task == "full" else f"; that is of all weights: adapters ({task}) are not planned"
    return f"`{command}` prices the strategy{adapters}"


def recipe_of(files: Files) -> tuple[str, Recipe] | None:
    """The first file of such a tool, by its keys."""
    for name in sorted(files):
        if name.endswith((".py", ".md")):
            continue
        for recipe in RECIPES:
            if all(mark.search(files[name]) for mark in recipe.marks):
                return name, recipe
    return None


_COMMENT = re.compile(r"(?:^|(?<=[ \t]))#.*$", re.M)
_OFF = ("", "false", "null", "~")


def _value(text: str, key: str) -> str:
    """What a line says of ``key``, in YAML (a list of words, too), as a Hydra override or as a flag; empty if nothing
    stands there."""
    between = r"(?:[ \t]+|=)" if key.startswith("--") else r"[ \t]*[:=][ \t]*"
    found = re.search(rf"^(?:[^#\n]*[\s+{{\"'])?{re.escape(key)}[\"']?{between}([^\s#,]+)", text, re.M)
    if found:
        return found.group(1)[:80]
    items = re.search(rf"^{re.escape(key)}[ \t]*:[ \t]*((?:\n[ \t]*- [ \t]*[\w.-]+)+)", text, re.M)
    return ", ".join(re.findall(r"- [ \t]*([\w.-]+)", items.group(1)))[:80] if items else ""
