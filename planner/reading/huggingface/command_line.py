"""The Trainer's arguments where a launch script gives them as flags (``--per_device_train_batch_size 4 --bf16 True``).

Flags that are no TrainingArguments belong to the script and are left to it, unless they are near misses; a value that
depends on a variable that nobody sets stays open."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from planner.errors import InputError
from planner.reading.configuration import Files
from planner.reading.huggingface import keys
from planner.reading.huggingface.values import TRUE, Notes, Section
from planner.reading.texts.shell import Launch, Word, entry_scripts, launches, read_script

_MARK = re.compile(r"^[^#\n]*--per[_-]device[_-]train[_-]batch[_-]size\b", re.M)
_LENGTHS = ("model_max_length",)
_KNOWN = frozenset(keys.ARGUMENTS) | frozenset(keys.SUBCLASS_ARGUMENTS) | frozenset(keys.REMOVED_ARGUMENTS)
_ADAPTERS = re.compile(r"(use_)?(q_?)?(lora|peft)(_enable)?|load_in_[48]bit")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def find_script(files: Files) -> str | None:
    """A script among the files that starts a training with these arguments."""
    scripts = {name: text for name, text in files.items() if not name.endswith((".json", ".py", ".md"))}
    marked = {name: text for name, text in scripts.items() if _MARK.search(text) and "\x00" not in text}
    return next((name for name in entry_scripts(scripts) if name in marked), next(iter(marked), None))


def script_arguments(files: Files, name: str) -> Section:
    """The flags of the script's largest command, as the JSON file of the arguments would hold them."""
    script = read_script(files, name)
    found = sorted(launches(script), key=lambda launch: -len(launch.arguments))
    marked = [launch for launch in found if "per_device_train_batch_size" in dict(_flags(launch))]
    if not marked:
        raise InputError(
            "no command with the Trainer's arguments was found",
            where=name,
            got="--per_device_train_batch_size outside of a command that starts Python",
            allowed="torchrun, deepspeed, accelerate launch or python, a script, and its flags",
            hint="name the script that starts the training",
        )
    launch = marked[0]
    notes = Notes(name, unread=list(script.missing))
    values, lines = _values(launch, notes)
    notes.lines = lines
    if launch.gpus is not None:
        values["world_size"] = launch.gpus
    return Section(values, notes)


def _flags(launch: Launch) -> Iterator[tuple[str, list[Word]]]:
    """Names with underscores, and the words that follow each."""
    name, words = "", []
    for word in launch.arguments:
        if not word.text.startswith("--"):
            words.append(word)
            continue
        if name:
            yield name, words
        flag, equals, value = word.text.removeprefix("--").partition("=")
        name, words = _whole(flag.replace("-", "_")), [Word(value, word.where, word.unset)] if equals else []
    if name:
        yield name, words


def _whole(name: str) -> str:
    """A flag cut by a letter or two counts as the one that it begins (argparse, allow_abbrev)."""
    longer = [known for known in _KNOWN if known.startswith(name) and len(name) >= 0.8 * len(known)]
    return longer[0] if name not in _KNOWN and len(longer) == 1 else name


def _values(launch: Launch, notes: Notes) -> tuple[dict[str, Any], Mapping[tuple[str, ...], int]]:
    values: dict[str, Any] = {}
    lines: dict[tuple[str, ...], int] = {}
    for name, words in _flags(launch):
        text = " ".join(word.text for word in words)
        if _ADAPTERS.fullmatch(name) and (not text or text.lower() in TRUE):
            notes.skip(f"{name}: all weights are taken to be trained, in full precision")
        if name not in _KNOWN and name not in _LENGTHS and not get_close_matches(name, _KNOWN, n=1, cutoff=0.93):
            continue
        if any(word.unset for word in words):
            notes.unread += [] if name == "deepspeed" else [f"{name}: {text}"]
            values[name] = text if name == "deepspeed" else "auto"
            continue
        values[name] = _value(text) if words else True
        if words:
            line = words[0].where.rpartition(":")[2]
            lines[name,] = int(line) if line.isdigit() else 1
    return values, lines


def _value(text: str) -> Any:
    """A flag's text as JSON would have it."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _NUMBER.fullmatch(text) and len(text) < 30:
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    if text.startswith("{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text
