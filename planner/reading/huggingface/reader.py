"""accelerate's configuration file and the Trainer's arguments, together or alone, in the planner's words.

Follows accelerate 1.15 and transformers 5.23; keys that they drop without a word become findings.  What no file of
theirs holds (sequence length, attention) is read from a rendered ``plan_setup.py`` where it lies beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from planner.backends.stacks import chunked_loss_bytes
from planner.errors import InputError
from planner.reading.configuration import Configuration, Files
from planner.reading.huggingface.deepspeed import with_deepspeed
from planner.reading.huggingface.fsdp import yaml_sharding
from planner.reading.huggingface.launch import (
    Machines,
    check_keys,
    check_launch,
    distributed_type,
    read_machines,
    read_mesh,
    refuse_elsewhere,
    stated_precision,
)
from planner.reading.huggingface.megatron import with_megatron
from planner.reading.huggingface.recipes import recipe_of
from planner.reading.huggingface.strategies import replicated, with_fsdp
from planner.reading.huggingface.training_arguments import TrainerSays, arguments_of, find_arguments, world_size
from planner.reading.huggingface.values import FALSE, Section, read_json, read_yaml
from planner.reading.texts.python_module import literals, parse_python
from planner.specs.finding import Finding

SETUP_MODULE = "plan_setup.py"

_TYPE = re.compile(r"""^distributed_type\s*:|"distributed_type"\s*:""", re.M)
"""The key that accelerate insists on, at the top level of YAML or anywhere in JSON."""


class AccelerateReader:
    """accelerate's file, with training_arguments.json, a DeepSpeed file and plan_setup.py where they are."""

    name = "accelerate"
    title = "accelerate configuration (YAML or JSON with distributed_type)"

    def recognises(self, files: Files) -> bool:
        return _find_config(files) is not None

    def read(self, files: Files) -> Configuration:
        name = _find_config(files) or next((name for name in sorted(files) if name.endswith((".yaml", ".yml"))), None)
        if name is None:
            raise InputError(
                "there is no YAML file among these",
                where=", ".join(sorted(files)),
                hint="name the YAML that accelerate config wrote",
            )
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
            raise InputError(
                "there is no JSON or YAML file among these",
                where=", ".join(sorted(files)),
                hint="name the file with the TrainingArguments",
            )
        says = arguments_of(files, name)
        machines = Machines(gpus=world_size(says.section), gpus_per_node=None)
        mesh = read_mesh(says.section.section("parallelism_config"), yaml_file=False)
        if says.deepspeed is not None:
            configuration = with_deepspeed(says.section, says, files, machines, mesh, None)
        elif says.sharding is not None:
            configuration = with_fsdp(says.section, says.sharding, says, machines, mesh, None)
        else:
            says.section.notes.add(
                "sharding-elsewhere",
                "note",
                "neither fsdp nor deepspeed is set, so nothing is sharded unless accelerate's own file says so",
                hint="give the configuration that accelerate launch was started with, too",
            )
            configuration = replicated(says.section, says, machines, None)
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
    refuse_elsewhere(top)
    check_keys(top)
    check_launch(top)
    machines = read_machines(top)
    kind = distributed_type(top)
    mesh = read_mesh(top.section("parallelism_config"), yaml_file=True)
    stated = stated_precision(top)
    if kind == "DEEPSPEED" or (says is not None and says.deepspeed is not None):
        return with_deepspeed(top, says, files, machines, mesh, stated)
    own = says.sharding if says is not None else None
    if kind == "FSDP" or own is not None:
        sharding = own or yaml_sharding(top.section("fsdp_config"))
        return with_fsdp(top, sharding, says, machines, mesh, stated)
    if kind == "MEGATRON_LM":
        return with_megatron(top, says, machines, stated)
    return replicated(top, says, machines, stated)


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
    try:
        constants = literals(parse_python(name, files[name]))
    except InputError:
        return configuration
    length, attention = constants.get("SEQ_LEN"), constants.get("ATTENTION")
    return replace(
        configuration,
        seq_len=length if isinstance(length, int) and length > 0 else configuration.seq_len,
        flash_attention=attention != "eager" if isinstance(attention, str) else configuration.flash_attention,
    )
