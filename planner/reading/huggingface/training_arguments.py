"""The Trainer's arguments (TrainingArguments.to_json_string, or JSON and YAML files that fill them) in the planner's
words.

They hold batch, precision and recomputation; sharding only where they name DeepSpeed or FSDP themselves, and never the
number of GPUs.  YAML files, as TRL's scripts take them, hold arguments of the model and of the data set, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from planner.errors import InputError
from planner.reading.configuration import Files
from planner.reading.huggingface import keys
from planner.reading.huggingface.command_line import find_script, script_arguments
from planner.reading.huggingface.fsdp import Sharding, argument_sharding
from planner.reading.huggingface.recipes import recipe_of
from planner.reading.huggingface.values import Notes, Section, read_json, read_yaml, shown, whole
from planner.specs.job import Task
from planner.specs.strategy import Recompute

DEFAULT_MICRO_BATCH = 8
"""per_device_train_batch_size of TrainingArguments."""

MARKED = frozenset({"per_device_train_batch_size", "output_dir"})
MARKS = re.compile(rf'"(?:{"|".join(sorted(MARKED))})"')
"""Keys by which the arguments are known."""
YAML_MARK = re.compile(r"^per_device_train_batch_size\s*:", re.M)

LENGTHS = ("max_length", "max_seq_length", "model_max_length", "cutoff_len")
"""What subclasses and scripts call the tokens of a sequence."""

ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused")
"""Optimizers with fp32 master weights and two fp32 moments, as plans count them."""

UNMODELLED = {
    "torch_compile": "compiled blocks",
    "use_liger_kernel": "its norms and activations",
    "tf32": "fp32 matrices in TF32",
    "torch_empty_cache_steps": "the allocator's cache is emptied",
    "auto_find_batch_size": "the batch is halved after an out-of-memory error",
    "optim_target_modules": "optimizer on some modules only",
    "full_determinism": "deterministic kernels",
    "activation_offloading": "activations in host memory",
    "padding_free": "sequences of different length",
    "ddp_bucket_cap_mb": "size of gradient buckets",
    "ddp_static_graph": "",
    "train_sampling_strategy": "order of samples by length",
    "load_in_4bit": "weights in 4 bits",
    "load_in_8bit": "weights in 8 bits",
    "use_vllm": "generation, and its memory, are not part of a step",
    "num_generations": "generation is not part of a step",
}
"""Switches that bear on speed or memory and are not modelled."""


@dataclass(frozen=True, kw_only=True)
class TrainerSays:
    """The arguments as far as they bear on a plan."""

    section: Section
    micro_batch: int | None
    grad_accum: int | None
    precision: str | None
    """bf16 or fp16 where the arguments choose it; None leaves it to the launcher."""
    recompute: Recompute | None
    """The Trainer's own checkpointing; None where it cannot be said."""
    sharding: Sharding | None
    """FSDP, where the arguments themselves ask for it."""
    deepspeed: Any
    """The configuration (a mapping) or the name of its file; None without DeepSpeed."""
    sync_each_batch: bool
    seq_len: int | None
    model_name: str | None = None
    task: Task | None = None
    loss_in_parts: bool = False
    """Liger's loss never holds all logits at once."""

    def settled(self) -> dict[str, Any]:
        """The set arguments, aliases resolved: what stands for ``auto`` in a DeepSpeed file."""
        values = {name: value for name, value in self.section.values.items() if value is not None}
        if self.recompute is not None:
            values["gradient_checkpointing"] = self.recompute.mode == "full"
        return values


def find_arguments(files: Files) -> str | None:
    """The file that holds TrainingArguments, by its keys; else the script that gives them as flags."""
    for name in sorted(files, key=lambda name: (not name.endswith("training_arguments.json"), name)):
        text = files[name].lstrip("\ufeff \t\r\n")
        if _is_yaml(name) and YAML_MARK.search(text) and recipe_of({name: text}) is None:
            return name
        if not text.startswith("{") or not (name.endswith("training_arguments.json") or MARKS.search(text)):
            continue
        try:
            values = read_json(files[name], name)
        except InputError:
            # Reading it says in which line it breaks.
            return name
        if MARKED & values.keys() and "zero_optimization" not in values:
            return name
    return find_script(files)


def _is_yaml(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def arguments_of(files: Files, name: str) -> TrainerSays:
    """The arguments in the file ``name``."""
    if _is_yaml(name):
        return read_arguments(read_yaml(files[name], name), shared=True)
    if name.endswith(".json") or files[name].lstrip("\ufeff \t\r\n").startswith("{"):
        section = Section(read_json(files[name], name), Notes(name))
        # HfArgumentParser fills several classes from one file.
        return read_arguments(section, shared="model_name_or_path" in section)
    return read_arguments(script_arguments(files, name))


def read_arguments(section: Section, *, shared: bool = False) -> TrainerSays:
    """Everything that the arguments say, with findings for what transformers refuses or ignores; ``shared`` where the
    file holds other arguments of the script beside them."""
    _unknown(section, shared)
    _unmodelled(section)
    bf16, fp16 = section.truth("bf16", False), section.truth("fp16", False)
    if bf16 and fp16:
        section.add("precision-twice", "error", "bf16 and fp16 are both true: the Trainer stops", "fp16")
    micro = section.count("per_device_train_batch_size", DEFAULT_MICRO_BATCH)
    accumulated = section.count("gradient_accumulation_steps", 1)
    accelerator = section.section("accelerator_config")
    steps = accelerator.section("gradient_accumulation_kwargs")
    if accelerator.truth("split_batches", False):
        accelerator.add(
            "split-batches",
            "warning",
            "per_device_train_batch_size is then the batch of all processes together",
            "split_batches",
            hint="set split_batches to false and divide the batch by the number of processes",
        )
        micro = None
    return TrainerSays(
        section=section,
        micro_batch=micro,
        grad_accum=_accumulation(section, steps, accumulated),
        precision="bf16" if bf16 else "fp16" if fp16 else None,
        recompute=_recompute(section),
        sharding=argument_sharding(section),
        deepspeed=section.values.get("deepspeed") or None,
        sync_each_batch=bool(steps.truth("sync_each_batch", False)),
        seq_len=_seq_len(section),
        model_name=section.word("model_name_or_path"),
        task="lora" if section.truth("use_peft", False) else None,
        loss_in_parts=_loss_in_parts(section),
    )


def _loss_in_parts(section: Section) -> bool:
    """Head and cross entropy in one, unless the kernel's own settings leave it out."""
    chosen = section.section("liger_kernel_config").truth("fused_linear_cross_entropy", True)
    return bool(section.truth("use_liger_kernel", False)) and chosen is not False


def _seq_len(section: Section) -> int | None:
    """The longest sequence: stated whole, or as prompt and completion."""
    whole_ = next((n for key in LENGTHS if (n := section.count(key))), None)
    prompt, completion = section.count("max_prompt_length"), section.count("max_completion_length")
    return whole_ if whole_ or not (prompt and completion) else prompt + completion


def _accumulation(section: Section, steps: Section, accumulated: int | None) -> int | None:
    """num_steps of accelerate's plugin takes the place of an argument of 1 and contradicts a larger one."""
    own = steps.count("num_steps")
    if own is None:
        return accumulated
    if (accumulated or 1) > 1:
        section.add(
            "accumulation-twice",
            "error",
            f"gradient_accumulation_steps({accumulated}) and num_steps({own}) are both set: the Trainer stops",
            "gradient_accumulation_steps",
        )
    return own


def _recompute(section: Section) -> Recompute | None:
    """Under its present name or the older one, which counts where the new one is not set."""
    name = "activation_checkpointing" if "activation_checkpointing" in section else "gradient_checkpointing"
    asked = section.truth(name, False)
    if not asked:
        return None if asked is None else Recompute()
    options = section.section(f"{name}_kwargs")
    if (options.count("every_n_layers", 1) or 1) > 1:
        section.notes.skip(f"{name}_kwargs.every_n_layers: only some layers are recomputed")
        return None
    if options.truth("offload", False):
        section.notes.skip(f"{name}_kwargs.offload: saved activations wait in host memory")
    return Recompute(mode="full")


def _unknown(section: Section, shared: bool) -> None:
    """Names that TrainingArguments does not have: it stops at the first one.  In a shared file another class may have
    them, unless they are nearly one of its own."""
    for name in section.values:
        if name in keys.ARGUMENTS or name in keys.SUBCLASS_ARGUMENTS or name.startswith("_"):
            continue
        if name in (*LENGTHS, "world_size"):
            continue
        if name in keys.REMOVED_ARGUMENTS:
            new = keys.REMOVED_ARGUMENTS[name]
            section.add(
                "removed-argument",
                "error",
                f"{name} was removed: TrainingArguments of transformers 5.23 stops",
                name,
                hint=f"use {new}" if new else "leave it out",
            )
            continue
        near = get_close_matches(name, keys.ARGUMENTS, n=1, cutoff=0.85)
        if shared and (not near or name in keys.SCRIPT_ARGUMENTS):
            continue
        section.add(
            "unknown-argument",
            "error" if near else "warning",
            f"TrainingArguments knows no {name}" + ("" if near else "; a subclass may"),
            name,
            hint=f"did you mean {near[0]}?" if near else "",
        )


def _unmodelled(section: Section) -> None:
    for name, told in UNMODELLED.items():
        value = section.values.get(name)
        if value in (None, False, "no", "false", "random", 0):
            continue
        section.notes.skip(f"{name}: {shown(value)}" + (f" ({told})" if told else ""))
    optimizer = section.word("optim")
    if optimizer is not None and optimizer.rsplit(".", 1)[-1].lower() not in ADAM:
        section.notes.skip(f"optim: {optimizer} (states of another size)")


def world_size(section: Section) -> int | None:
    """Processes, where somebody added them to the arguments."""
    return whole(section.values.get("world_size"))


def deepspeed_file(says: TrainerSays, files: Files) -> tuple[Mapping[str, Any], str] | None:
    """The DeepSpeed configuration that the arguments hold or name, and where it stands; None where it is not given."""
    config = says.deepspeed
    if isinstance(config, Mapping):
        return config, says.section.notes.place("deepspeed")
    return find_deepspeed(config, files)


def find_deepspeed(name: Any, files: Files) -> tuple[Mapping[str, Any], str] | None:
    """The file ``name`` among ``files``, by its path or by its last part; the only one where a variable names it."""
    if not isinstance(name, str):
        return None
    exact = [path for path in files if path == name.removeprefix("./")]
    alike = [path for path in files if path.rsplit("/", 1)[-1] == name.rsplit("/", 1)[-1]]
    if "$" in name:
        alike += [path for path, text in files.items() if path.endswith(".json") and "zero_optimization" in text]
        alike = alike if len(alike) == 1 else []
    for path in (*exact, *alike[:1]):
        return read_json(files[path], path), path
    return None
