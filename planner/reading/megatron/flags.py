"""Megatron-LM's arguments as a script or a log states them: names, values, where they stand, and what is misspelt.

The list of flags is that of one release (megatron_flags.txt); names that moved or went are kept beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from planner.reading.texts.shell import Word
from planner.specs.finding import Finding

Kind = Literal["value", "list", "on", "off", "either"]

RELEASE = "megatron-core 0.19"
"""The release whose flags are listed."""

MOVED: dict[str, str] = {
    "batch-size": "--micro-batch-size",
    "warmup": "--lr-warmup-fraction",
    "model-parallel-size": "--tensor-model-parallel-size",
    "virtual-pipeline-model-parallel-size": "--num-virtual-stages-per-pipeline-rank",
    "num-layers-in-first-pipeline-stage": "--decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "--decoder-last-pipeline-num-layers",
    "checkpoint-activations": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "checkpoint-num-layers": "--recompute-num-layers",
    "activations-checkpoint-method": "--recompute-method",
    "activations-checkpoint-num-layers": "--recompute-num-layers",
    "activations-checkpoint-granularity": "--recompute-granularity",
    "fp8-hybrid": "--fp8-format hybrid",
    "fp8-e4m3": "--fp8-format e4m3",
    "use-custom-fsdp": "--use-megatron-fsdp",
    "no-position-embedding": "--position-embedding-type none",
    "no-async-tensor-model-parallel-allreduce": "nothing: it has no effect any more",
    "use-legacy-models": "nothing: only megatron-core models are left",
    "use-mcore-models": "nothing: megatron-core models are the only ones",
    "recompute-activations": "--recompute-granularity selective",
    "use-rotary-position-embeddings": "--position-embedding-type rope",
    "use-flash-attn": "--attention-backend flash",
    "cuda-graph-scope": "--cuda-graph-modules",
    "fp16-params": "--fp16",
    "lora-rank": "a script with adapters: pretrain_gpt.py trains all weights",
}
"""Old names, and names of the configuration classes that people write as flags -> what to write."""

_REFUSED_THOUGH_LISTED = frozenset(
    {"batch-size", "warmup", "model-parallel-size", "checkpoint-activations", "no-position-embedding"}
)
"""Flags that the parser still knows, only to stop with a message (validate_args)."""

_SHOULD_MOVE = frozenset({"use-rotary-position-embeddings", "cuda-graph-scope"})
"""Flags that still work under their old name."""


_LISTS_OF_THE_FORK = frozenset({"num-experts"})
"""Flags that take several values in Megatron-DeepSpeed."""


@cache
def known_flags() -> dict[str, tuple[Kind, str, str]]:
    """Spelling -> (kind, name of the parsed argument, first spelling)."""
    table: dict[str, tuple[Kind, str, str]] = {}
    text = (files("planner.reading.megatron") / "megatron_flags.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        kind, argument, *spellings = line.split()
        for spelling in spellings:
            table[spelling] = (kind, argument, spellings[0])  # type: ignore[assignment]
    return table


@cache
def flag_of_argument() -> dict[str, tuple[Kind, str]]:
    """Name of a parsed argument -> (kind, spelling) of the flag that sets it."""
    return {argument: (kind, first) for kind, argument, first in reversed(list(known_flags().values()))}


@dataclass
class Stated:
    """Arguments by their hyphenated names."""

    values: dict[str, Any] = field(default_factory=dict)
    """True for a switch, text for a value, a tuple of texts for a list."""
    places: dict[str, str] = field(default_factory=dict)
    complete: bool = True
    """What is absent has Megatron's default; false for an excerpt of a log, where it is simply not known."""
    part: bool = False
    """A list of flags that says nothing of the run: whole as far as it describes the model."""
    described_by: str = ""
    """A training script that builds another model than pretrain_gpt.py does."""
    cleared: set[str] = field(default_factory=set)
    """Arguments that a log states as not set."""
    unresolved: dict[str, str] = field(default_factory=dict)
    """Arguments whose value depends on a variable that nobody sets."""
    findings: list[Finding] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def place(self, *names: str) -> str:
        """Where the first of these arguments stands; its flag where it stands nowhere."""
        return next((self.places[name] for name in names if name in self.places), f"--{names[0]}")

    def text(self, name: str, default: str | None = None) -> str | None:
        """The value; Megatron's ``default`` where the arguments are complete and have none."""
        self.used.add(name)
        value = self.values.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, tuple):
            return value[0] if value else None
        absent = self.complete or name in self.cleared
        return default if absent and name not in self.unresolved else None

    def items(self, name: str) -> tuple[str, ...]:
        """The words of a list."""
        self.used.add(name)
        value = self.values.get(name, ())
        return value if isinstance(value, tuple) else (str(value),)

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int | None:
        """A whole number of at least ``least``; a finding and None where the text is none."""
        text = self.text(name)
        if text is None:
            absent = self.complete or name in self.cleared
            return default if absent and name not in self.unresolved else None
        if re.fullmatch(r"[+-]?\d{1,9}", text) and int(text) >= least:
            return int(text)
        self.bad_value(name, text, f"a whole number of at least {least}")
        return None

    def share(self, name: str, default: float) -> float | None:
        """A number between 0 and 1."""
        text = self.text(name)
        if text is None:
            return default if name not in self.unresolved else None
        if re.fullmatch(r"\d*\.?\d+(e-?\d+)?", text.lower()) and 0 <= float(text) <= 1:
            return float(text)
        self.bad_value(name, text, "a number between 0 and 1")
        return None

    def switch(self, name: str) -> bool | None:
        """Whether a switch is set; None where an excerpt does not say."""
        self.used.add(name)
        if self.values.get(name):
            return True
        if name in self.unresolved:
            return None
        return False if self.complete or name in self.cleared else None

    def known(self, name: str) -> bool:
        """Whether a value is stated, or follows from being left out."""
        return name not in self.unresolved and (self.complete or name in self.values or name in self.cleared)

    def bad_value(self, name: str, text: str, allowed: str) -> None:
        """Notes that a value has the wrong form (once)."""
        found = Finding(
            id="value-of-wrong-form",
            severity="error",
            message=f"--{name} takes {allowed}, not {text[:60]!r}",
            where=self.place(name),
            allowed=allowed,
        )
        if found not in self.findings:
            self.findings.append(found)

    def note(self, finding: Finding) -> None:
        self.findings.append(finding)


def from_words(
    words: Sequence[Word], *, own_script: bool, doubtful: Set[str] = frozenset(), part: bool = False
) -> Stated:
    """Arguments of a command line.

    ``own_script``: the script may have flags of its own. ``doubtful``: variables that may hold any flags, so that what
    is absent is not known. ``part``: a list of flags without a command; without --micro-batch-size, which every run
    needs, it is not the whole.
    """
    stated = Stated()
    lists = _LISTS_OF_THE_FORK if any(word.text == "--deepspeed" for word in words) else frozenset()
    index = 0
    while index < len(words):
        word = words[index]
        if not word.text.startswith("--"):
            if word.text.strip() and not word.unset:
                stated.note(_stray(word))
            elif word.unset:
                stated.unresolved.setdefault(f"words of {word.text}", word.text)
                stated.complete = stated.complete and not _stands_for(word, doubtful)
            index += 1
            continue
        values = [word.text.partition("=")[2]] if "=" in word.text else []
        name = _named(stated, word, own_script=own_script, part=part)
        kind = "list" if name in lists else known_flags().get(name, (None, "", ""))[0]
        unset = word.unset if values else ()
        index += 1
        if not values and kind not in ("on", "off", "either"):
            taken = _values(words[index:], 1 if kind == "value" else None, doubtful)
            values, unset = [value.text for value in taken], tuple(v for value in taken for v in value.unset)
            index += len(taken)
        _store(stated, word, name, values, kind, unset)
    _taken_with_rope(stated)
    _replace_moved(stated)
    if part and "micro-batch-size" not in stated.places:
        stated.part, stated.complete = stated.complete, False
    return stated


def _moved(name: str) -> bool:
    """Whether the parser refuses this name and another means the same."""
    return name in MOVED and (name not in known_flags() or name in _REFUSED_THOUGH_LISTED)


def _taken_with_rope(stated: Stated) -> None:
    """--no-position-embedding is refused only where the positions are not rotary (validate_args)."""
    rotary = "use-rotary-position-embeddings" in stated.values
    if rotary or stated.values.get("position-embedding-type") == "rope":
        stated.values.pop("no-position-embedding", None)
        stated.findings = [found for found in stated.findings if "--no-position-embedding" not in found.message]


def _replace_moved(stated: Stated) -> None:
    """Reads what moved as its successors, where those are not given themselves."""
    for old in sorted(filter(_moved, stated.values), key=lambda name: MOVED[name].count("--")):
        for name, value in _successors(old):
            stated.places.setdefault(name, stated.places[old])
            stated.values.setdefault(name, value or stated.values[old])


def _successors(name: str) -> list[tuple[str, str]]:
    """Flags, each with its value if it has one, that say the same today."""
    instead = MOVED.get(name, "") if _moved(name) else ""
    return re.findall(r"--([a-z0-9-]+)(?: ([^-\s]\S*))?", instead) if instead.startswith("--") else []


def _stands_for(word: Word, doubtful: Set[str]) -> bool:
    """Whether the word is nothing but a variable that may hold flags."""
    return len(word.unset) == 1 and word.text == f"${word.unset[0]}" and word.unset[0] in doubtful


def _values(words: Sequence[Word], most: int | None, doubtful: Set[str]) -> list[Word]:
    taken: list[Word] = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word.text) or len(taken) == most:
            break
        if most is None and _stands_for(word, doubtful):
            break
        taken.append(word)
    return taken


def _named(stated: Stated, word: Word, *, own_script: bool, part: bool) -> str:
    """The flag's first spelling, with a finding where it is misspelt, unknown or moved."""
    written = word.text.partition("=")[0].removeprefix("--")
    name = written.replace("_", "-")
    table = known_flags()
    if written in table and written not in _REFUSED_THOUGH_LISTED | _SHOULD_MOVE:
        return table[written][2]
    if _moved(name):
        stated.note(
            Finding(
                id="flag-moved",
                severity="error",
                message=f"{RELEASE} does not take --{written} any more" if name in table else f"no flag --{written}",
                where=word.where,
                hint=f"write {MOVED[name]}",
            )
        )
        return name
    if name in _SHOULD_MOVE:
        stated.note(
            Finding(
                id="flag-deprecated",
                severity="note",
                message=f"--{written} is an old spelling",
                where=word.where,
                hint=f"write {MOVED[name]}",
            )
        )
        return name
    if name in table:
        stated.note(
            Finding(
                id="flag-with-underscores",
                severity="error",
                message=f"Megatron-LM's parser knows --{name}, not --{written}; it was read as if it were right",
                where=word.where,
                hint=f"write --{name}",
            )
        )
        return table[name][2]
    near = get_close_matches(name, table, n=1, cutoff=0.75)
    stated.note(
        Finding(
            id="flag-unknown",
            severity="note" if own_script or (part and not near) else "error",
            message=f"{RELEASE} has no flag --{written}"
            + (": it stops there" if not own_script and (near or not part) else ", unless the training script adds it"),
            where=word.where,
            hint=f"did you mean --{near[0]}?" if near else "",
        )
    )
    return name


def _stray(word: Word) -> Finding:
    return Finding(
        id="stray-word",
        severity="error",
        message=f"{word.text[:60]!r} belongs to no flag",
        where=word.where,
        hint="a switch takes no value; quote values that hold spaces",
    )


def _store(stated: Stated, word: Word, name: str, values: list[str], kind: Kind | None, unset: Iterable[str]) -> None:
    value: Any = True
    if kind == "list" or (kind is None and len(values) > 1):
        value = tuple(values)
    elif values:
        value = values[0]
    elif kind == "value":
        stated.note(Finding(id="value-missing", severity="error", message=f"--{name} has no value", where=word.where))
        return
    if name in stated.values and stated.values[name] != value:
        stated.note(
            Finding(
                id="flag-given-twice",
                severity="warning",
                message=f"--{name} is given as {_shown(stated.values[name])} at {stated.places[name]} and as "
                f"{_shown(value)} here; the last one counts",
                where=word.where,
            )
        )
    stated.places[name] = word.where
    if tuple(unset):
        stated.values.pop(name, None)
        stated.unresolved[name] = _shown(value)
        return
    stated.unresolved.pop(name, None)
    stated.values[name] = value


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def from_log(pairs: Sequence[tuple[str, str, str]], *, complete: bool) -> Stated:
    """Arguments from (name, value, place) lines of the dump that Megatron-LM prints."""
    stated = Stated(complete=complete)
    for argument, text, place in pairs:
        kind, name = flag_of_argument().get(argument, ("value", argument.replace("_", "-")))
        if name in stated.places:
            continue
        stated.places[name] = place
        value = _logged(text)
        if kind == "off":
            value = True if value is False else None
        if value is None or value is False or value == ():
            stated.cleared |= {name, *(new for new, _ in _successors(name))}
        else:
            stated.values[name] = value if value is True or isinstance(value, tuple) else str(value)
    # It is worked out from the flags that the log has, too.
    stated.values.pop("virtual-pipeline-model-parallel-size", None)
    _replace_moved(stated)
    return stated


def _logged(text: str) -> Any:
    """A printed Python value: None, a boolean, a tuple of texts, or the text itself."""
    text = text.strip()
    if text in ("None", ""):
        return None
    if text in ("True", "False"):
        return text == "True"
    if text.startswith(("[", "(")) and len(text) < 10_000:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return text
        return tuple(map(str, value)) if isinstance(value, (list, tuple)) else text
    return text.rpartition(".")[2] if re.fullmatch(r"[A-Z]\w*\.\w+", text) else text
