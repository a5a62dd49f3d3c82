"""Megatron-Bridge's overrides, dotted (``model.tensor_model_parallel_size=8``) or in YAML, as a configuration.

Fields are read as the arguments of Megatron-LM that mean the same, by the table that also renders them, so layout,
model, habits and findings are those of that framework."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files as package_files
from typing import Any

from planner.backends.bridge_fields import LISTS, RECIPE, RECIPE_SWITCHES, SWITCHES, VALUES
from planner.errors import InputError
from planner.reading.configuration import Configuration, Files
from planner.reading.megatron.flags import Stated
from planner.reading.megatron.reader import Source, configuration_of
from planner.reading.megatron.setting import CONNECTIONS
from planner.reading.texts.shell import Launch, Script, Word, entry_scripts, launches, read_script
from planner.reading.texts.yaml_lines import YamlFile, load_yaml
from planner.specs.finding import Finding

_OVERRIDE = re.compile(r"\+{0,2}([a-z_]\w*\.[\w.]+|mixed_precision)=(.*)")
_DEEPEST = 6
"""Levels of a YAML file; fields of the configuration have two or three."""
_UNREAD_SECTIONS = frozenset(
    {"comm_overlap", "peft", "profiling", "ft", "straggler", "nvrx_straggler", "tensor_inspect", "inprocess_restart"}
    | {"rerun_state_machine", "optimizer_config_override_provider", "env_vars"}
)
"""Sections of the configuration whose fields are not read."""
_FIRM = re.compile(
    r"(?:^|\s)(?:model\.(?:tensor_model_parallel_size|pipeline_model_parallel_size|num_layers)|train\.micro_batch_size)="
)
_FLAGS = {field: name for name, field in {**VALUES, **LISTS}.items()}
_SWITCHED = {field: (name, value) for name, (field, value) in SWITCHES.items()}
_PRECISIONS: dict[str, dict[str, object]] = {
    "bf16_mixed": {"bf16": True},
    "fp16_mixed": {"fp16": True, "grad-reduce-in-bf16": True},
    "bf16_with_mxfp8_mixed": {"bf16": True, "fp8-format": "e4m3", "fp8-recipe": "mxfp8", "fp8-param-gather": True},
    "bf16_with_fp8_current_scaling_mixed": {
        "bf16": True,
        "fp8-format": "hybrid",
        "fp8-recipe": "tensorwise",
        "fp8-param-gather": True,
    },
    "bf16_with_fp8_delayed_scaling_mixed": {
        "bf16": True,
        "fp8-format": "hybrid",
        "fp8-recipe": "delayed",
        "fp8-param-gather": True,
    },
    "bf16_with_nvfp4_mixed": {"bf16": True, "fp4-format": "e2m1"},
    "None": {},
}
"""Mixed-precision recipes as arguments (megatron/bridge/training/mixed_precision.py)."""


@dataclass(frozen=True)
class _Override:
    field: str
    text: str
    where: str


class MegatronBridgeOverrides:
    """A file of overrides, or a script that gives them on the command line."""

    name = "megatron-bridge-overrides"
    title = "Megatron-Bridge overrides (section.field=value, or YAML with these sections)"

    def recognises(self, files: Files) -> bool:
        return any("\x00" not in text and _FIRM.search(text) for text in files.values()) or bool(_documents(files))

    def read(self, files: Files) -> Configuration:
        launch, missing = _launch(files)
        given = list(_overrides(files, launch))
        if not given:
            raise InputError(
                "no override of Megatron-Bridge was found",
                where=", ".join(sorted(files)),
                got="no word like section.field=value",
                allowed="model.tensor_model_parallel_size=8, one a line or on the command line",
                hint="name the file with the overrides, or the run_config.yaml",
            )
        documents = _documents(files)
        recipe = _recipe(launch) if launch else "the recipe that the file changes" if documents else ""
        stated = _stated(given, foreign=bool(recipe))
        source = Source(
            stated,
            given[0].where.partition(":")[0],
            launch.gpus if launch else None,
            launch.per_node if launch else None,
            # It starts without the variable, unlike pretrain_gpt.py; only FSDP refuses 1 (config.py, validate).
            launch.environment if launch and launch.environment.get(CONNECTIONS) == "1" else None,
            (
                *([f"{recipe}: what it sets itself (model, layout, adapters) is not known here"] if recipe else []),
                *missing,
                *(f"{o.field}={o.text}" for o in given if o.field.partition(".")[0] in _UNREAD_SECTIONS),
            ),
        )
        found = configuration_of(source, self.title)
        return replace(
            found,
            backend="megatron-bridge",
            findings=tuple(_respelt(finding) for finding in found.findings),
            unread=tuple(_fields(text) for text in found.unread),
        )


def _launch(files: Files) -> tuple[Launch | None, tuple[str, ...]]:
    """The command with the most overrides, where a script is among the files."""
    scripts = {name: text for name, text in files.items() if not name.endswith((".py", ".txt", ".yaml", ".json"))}
    best: tuple[int, Launch, tuple[str, ...]] | None = None
    for name in entry_scripts(scripts):
        script = read_script(scripts, name)
        for launch in _commands(script):
            size = sum(_OVERRIDE.fullmatch(word.text) is not None for word in launch.arguments)
            if best is None or size > best[0]:
                best = size, launch, tuple(script.missing)
    return (None, ()) if best is None else best[1:]


def _commands(script: Script) -> Iterator[Launch]:
    """What starts Python, any other command, and the variables where a command's words are not known."""
    started = launches(script)
    yield from started
    for command in script.commands:
        yield Launch(None, command.words, command.environment, {}, "")
    words = tuple(word for words in script.arrays.values() for word in words)
    yield replace(started[0], arguments=(*started[0].arguments, *words)) if started else Launch(None, words, {}, {}, "")


_FIRM_FIELDS = frozenset(
    {"model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "train.micro_batch_size"}
)


def _documents(files: Files) -> dict[str, list[_Override]]:
    """The YAML files that hold sections of the configuration: overrides, or the run_config.yaml of a run."""
    found: dict[str, list[_Override]] = {}
    for name, text in files.items():
        if not name.endswith((".yaml", ".yml")) or not re.search("model_parallel_size|micro_batch_size", text):
            continue
        try:
            document = load_yaml(name, text)
        except InputError:
            continue
        given = list(_flattened(document, document.value, ()))
        fields = {override.field for override in given}
        # NeMo's older files have a trainer and the batch among the model's keys.
        older = "model.micro_batch_size" in fields or any(field.startswith("trainer.") for field in fields)
        if fields & _FIRM_FIELDS and len(fields & known_fields()) > 1 and not older:
            found[name] = given
    return found


def _flattened(document: YamlFile, value: Any, path: tuple[str, ...]) -> Iterator[_Override]:
    """Each value under its dotted name; an object that is only named, not made, is its own name."""
    if isinstance(value, dict) and not (value.get("_call_") is False and "_target_" in value):
        for key, inner in value.items():
            if len(path) < _DEEPEST and isinstance(key, str) and key != "_target_":
                yield from _flattened(document, inner, (*path, key))
        return
    if isinstance(value, dict):
        value = str(value["_target_"]).rpartition(".")[2]
    text = f"[{', '.join(map(str, value))}]" if isinstance(value, list) else "null" if value is None else str(value)
    yield _Override(".".join(path), text, document.where(*path))


def _recipe(launch: Launch) -> str:
    """The recipe or script that the overrides change, where it is not the one without settings of its own."""
    named = _option(launch.arguments, "--recipe")
    if named:
        return "" if named in (RECIPE, RECIPE.removesuffix("_pretrain_config")) else f"recipe {named}"
    script = posixpath.basename(launch.script.text) if launch.script else ""
    return "" if script in ("", "pretrain_bridge.py") else script


def _option(words: Sequence[Word], name: str) -> str:
    """The value of a flag; empty without it."""
    for word, after in zip(words, [*words[1:], Word("", "")], strict=True):
        flag, _, value = word.text.partition("=")
        if flag == name:
            return value or after.text
    return ""


def _overrides(files: Files, launch: Launch | None) -> Iterator[_Override]:
    """Lines of override files first, then words of the command line, which come later and win."""
    for given in _documents(files).values():
        # What belongs to other sections or classes is the recipe's business.
        yield from (override for override in given if override.field in known_fields() | {"mixed_precision"})
    for name, text in files.items():
        if "\x00" in text:
            raise InputError(
                "this is no text file",
                where=name,
                got="a zero byte",
                allowed="section.field=value lines",
                hint="name the file with the overrides, or the run_config.yaml",
            )
        if name.endswith((".py", ".sh", ".sbatch")):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found = _OVERRIDE.fullmatch(line.partition(" #")[0].strip())
            if found:
                yield _Override(found[1], found[2].strip().strip("\"'"), f"{name}:{number}")
    for word in launch.arguments if launch else ():
        found = _OVERRIDE.fullmatch(word.text)
        if found:
            yield _Override(found[1], "" if word.unset else found[2], word.where)


@cache
def known_fields() -> frozenset[str]:
    """Every section.field of the release."""
    text = (package_files("planner.reading.megatron") / "bridge_fields.txt").read_text(encoding="utf-8")
    return frozenset(line for line in text.splitlines() if line and not line.startswith("#"))


def _stated(given: list[_Override], *, foreign: bool) -> Stated:
    """The overrides as arguments of Megatron-LM, on top of what the recipe has set; ``foreign``: a recipe whose
    settings are not known, so what is not overridden is not known either."""
    stated = Stated(complete=not foreign)
    if not foreign:
        stated.values |= {"bf16": True, "moe-token-dispatcher-type": "allgather"}
        stated.values |= dict.fromkeys(RECIPE_SWITCHES, True)
    # The recipe's sections disagree on the sharded optimizer, which switches it on (config.py, validate).
    stated.values["use-distributed-optimizer"] = True
    sections: dict[str, str] = {}
    for override in given:
        sections[override.field] = override.text
        if override.field.partition(".")[0] in _UNREAD_SECTIONS:
            continue
        if override.field not in known_fields() and override.field != "mixed_precision":
            _unknown(stated, override, foreign=foreign)
        elif override.text == "" or "$" in override.text:
            name = _FLAGS.get(override.field) or _SWITCHED.get(override.field, (override.field, True))[0]
            stated.unresolved[name] = override.text or "(a variable)"
            stated.values.pop(name, None)
        else:
            _apply(stated, override)
    mixed = sections.get("mixed_precision")
    if mixed is not None:
        _mixed_precision(stated, mixed)
    _sharding(stated, sections)
    _queries(stated)
    return stated


def _unknown(stated: Stated, override: _Override, *, foreign: bool) -> None:
    near = get_close_matches(override.field, known_fields(), n=1, cutoff=0.9 if foreign else 0.7)
    message = f"Megatron-Bridge 0.6 has no field {override.field}"
    stated.note(
        Finding(
            id="field-unknown",
            severity="error" if not foreign else "warning" if near else "note",
            message=f"{message} in its GPT configuration: another recipe's model or data may have it"
            if foreign
            else f"{message}; set from Python it would be silently ignored",
            where=override.where,
            hint=f"did you mean {near[0]}?" if near else "",
        )
    )


def _apply(stated: Stated, override: _Override) -> None:
    field, text = override.field, override.text
    if field in _FLAGS:
        name = _FLAGS[field]
        stated.places[name] = override.where
        if text.lower() in ("none", "null"):
            stated.values.pop(name, None)
            stated.cleared.add(name)
        elif name in LISTS:
            items = tuple(item.strip(" '\"") for item in text.strip("[]()").split(",") if item.strip())
            stated.values[name] = ",".join(items) if name == "window-size" else items
        else:
            stated.values[name] = text.removeprefix("torch.")
    elif field in _SWITCHED:
        name, meaning = _SWITCHED[field]
        stated.places[name] = override.where
        _switch(stated, name, text.capitalize() == str(meaning))
    else:
        _special(stated, override)


def _special(stated: Stated, override: _Override) -> None:
    """Fields whose argument has another form."""
    field, text = override.field, override.text
    values: dict[str, object] = {}
    if field == "model.activation_func":
        values = {"swiglu": text == "silu", "squared-relu": text == "squared_relu"}
    elif field == "model.moe_layer_freq":
        values = {"moe-layer-freq": text}
    elif field == "ddp.grad_reduce_in_fp32":
        values = {"grad-reduce-in-bf16": text.lower() == "false"}
    elif field == "model.bf16":
        values = {"bf16": text.lower() == "true"}
    for name, value in values.items():
        stated.places[name] = override.where
        if isinstance(value, bool):
            _switch(stated, name, value)
        else:
            stated.values[name] = value


def _switch(stated: Stated, name: str, value: bool) -> None:
    """On or off, where off is known as well as on."""
    stated.values[name] = value
    stated.cleared -= {name}
    if not value:
        stated.cleared.add(name)


def _mixed_precision(stated: Stated, name: str) -> None:
    """A named recipe of number formats; fields of the section come on top."""
    known = _PRECISIONS.get(name.replace("-", "_") if name != "None" else name)
    if known is None:
        stated.values.pop("bf16", None)
        stated.unresolved["bf16"] = f"({name})"
        return
    if "bf16" not in known:
        stated.values["bf16"] = False
    for flag, value in known.items():
        stated.values.setdefault(flag, value)


def _sharding(stated: Stated, sections: dict[str, str]) -> None:
    """Either section switches the sharded optimizer on for both; gathering without it does nothing here."""
    names = ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer")
    words = [text.capitalize() if (text := sections.get(name)) else None for name in names]
    stated.values["use-distributed-optimizer"] = not (words[0] in (None, "False") and words[1] == "False")
    if words[0] is not None and words[1] is not None and words[0] != words[1]:
        stated.note(
            Finding(
                id="sharding-contradicts-itself",
                severity="warning",
                message=f"{names[0]}={words[0]} and {names[1]}={words[1]}: Megatron-Bridge switches both on",
                where=names[0],
                hint="set both to the same value",
            )
        )


def _queries(stated: Stated) -> None:
    """Query groups count by themselves here."""
    if "num-query-groups" in stated.values:
        stated.values["group-query-attention"] = True
    if stated.values.get("seq-length"):
        stated.values.setdefault("max-position-embeddings", stated.values["seq-length"])
    # Its data set makes no attention mask by default (GPTDatasetConfig).
    stated.values.setdefault("no-create-attention-mask-in-dataloader", True)


def _fields(text: str) -> str:
    """Arguments in a sentence, respelt as fields."""

    def field(found: re.Match[str]) -> str:
        name = found[1]
        if name in SWITCHES:
            return f"{SWITCHES[name][0]}={SWITCHES[name][1]}"
        return VALUES.get(name) or LISTS.get(name) or _OTHER.get(name) or found[0]

    return re.sub(r"--([a-z0-9][a-z0-9-]*)", field, text)


_OTHER = {"bf16": "mixed_precision=bf16_mixed", "fp16": "mixed_precision=fp16_mixed"}


def _respelt(finding: Finding) -> Finding:
    return replace(
        finding,
        message=_fields(finding.message).replace("Megatron-LM", "Megatron-Bridge"),
        where=_fields(finding.where),
        hint=_fields(finding.hint),
    )
