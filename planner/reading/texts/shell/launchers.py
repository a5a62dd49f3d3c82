"""Which training script a command starts, with which arguments, on how many GPUs: torchrun, deepspeed, accelerate, srun
and mpirun, alone or around each other.

One GPU a process."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.reading.texts.shell.script import Script
from planner.reading.texts.shell.words import Command, Word


@dataclass(frozen=True)
class Launch:
    """A training script that a launcher starts."""

    script: Word | None
    """Path, or module after ``-m``; None where only arguments stand there."""
    arguments: tuple[Word, ...]
    environment: Mapping[str, str]
    options: Mapping[str, Word]
    """Options of the launcher, hyphenated and without dashes."""
    launcher: str
    """torchrun, srun, mpirun, deepspeed, accelerate, python, or nothing."""
    nodes: int | None = None
    per_node: int | None = None
    processes: int | None = None
    """All processes, where that is what the launcher is told."""

    @property
    def gpus(self) -> int | None:
        """One GPU a process."""
        if self.processes is not None:
            return self.processes
        return None if self.nodes is None or self.per_node is None else self.nodes * self.per_node


_SWITCHES = frozenset(
    {"standalone", "no-python", "module", "m", "run-path", "exclusive", "label", "l", "u", "use-env", "multi-gpu"}
    | {"allow-run-as-root", "no-local-rank", "overlap", "unbuffered", "use-deepspeed", "use-fsdp", "bind-to-none"}
)
"""Launcher options that take no value."""
_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
}
_NODE_OPTIONS = ("nnodes", "num-nodes", "nodes", "N", "num-machines")
_LOCAL_OPTIONS = ("nproc-per-node", "ntasks-per-node", "gpus-per-node", "num-gpus", "npernode")
_SPREADING: Mapping[str, Iterable[str]] = {
    "torchrun": ("nnodes",),
    "deepspeed": ("num-nodes", "hostfile", "H", "include", "i", "exclude", "e"),
}
"""Options without which a launcher stays on its node."""
_TOTAL_OPTIONS = ("ntasks", "n", "np", "num-processes")


def launches(script: Script) -> list[Launch]:
    """Every command of a script that starts Python, with the launchers around it."""
    return [found for command in script.commands if (found := _launch(command, script.directives)) is not None]


def _launch(command: Command, directives: Mapping[str, str]) -> Launch | None:
    words = list(command.words)
    place = next((i for i, word in enumerate(words) if _is_start(word.text)), None)
    if place is None:
        return None
    outer, _, _ = _options(words[:place])
    start = posixpath.basename(words[place].text)
    rest = words[place + 1 :]
    launcher = "python"
    options: dict[str, Word] = {}
    if start in _LAUNCHERS:
        launcher = _LAUNCHERS[start]
        rest = rest[1:] if start == "accelerate" else rest
    elif not start.endswith(".py"):
        rest, module = _python_module(rest)
        launcher = _LAUNCHERS.get(module, "python")
    else:
        rest = words[place:]
    if launcher != "python":
        options, rest, _ = _options(rest)
    target, arguments = _target(rest)
    given = {**{key: Word(text, "#SBATCH") for key, text in directives.items()}, **outer, **options}
    alone = launcher in _SPREADING and options.keys().isdisjoint(_SPREADING[launcher])
    inside = launcher if launcher != "python" or place == 0 else posixpath.basename(words[0].text)
    return Launch(
        target,
        tuple(arguments),
        command.environment,
        options or outer,
        inside,
        _count(given, _NODE_OPTIONS) or (1 if alone else None),
        _count(options or given, _LOCAL_OPTIONS),
        None if launcher == "torchrun" else _count(given, _TOTAL_OPTIONS) or _included(options),
    )


def _included(options: Mapping[str, Word]) -> int | None:
    """GPUs that DeepSpeed's launcher is told to use: ``host:0,1@host:2``."""
    text = next((options[name].text for name in ("include", "i") if name in options), "")
    hosts = text.split("@")
    if not all(re.fullmatch(r"[^:]+:\d+(,\d+)*", host) for host in hosts):
        return None
    return sum(len(host.split(",")) for host in hosts)


def _is_start(text: str) -> bool:
    name = posixpath.basename(text)
    return name in _LAUNCHERS or re.fullmatch(r"python[\d.]*", name) is not None or name.endswith(".py")


def _python_module(words: list[Word]) -> tuple[list[Word], str]:
    """What follows ``python``, and the launcher module that it runs, if it does."""
    index = 0
    while index < len(words) and re.fullmatch(r"-[uBOIsSE]+", words[index].text):
        index += 1
    if index + 1 < len(words) and words[index].text == "-m" and words[index + 1].text in _LAUNCHERS:
        return words[index + 2 :], words[index + 1].text
    return words[index:], ""


def _target(words: list[Word]) -> tuple[Word | None, list[Word]]:
    if words and words[0].text in ("-m", "--module") and len(words) > 1:
        return words[1], words[2:]
    if words and not words[0].text.startswith("-"):
        return words[0], words[1:]
    return None, words


def _options(words: list[Word]) -> tuple[dict[str, Word], list[Word], int]:
    """Options of a launcher up to the first word that is neither an option nor its value."""
    options: dict[str, Word] = {}
    index = 0
    while index < len(words):
        text = words[index].text
        if not text.startswith("-"):
            if index == 0 or words[0] is words[index]:
                break
            if posixpath.basename(words[0].text) in ("srun", "mpirun", "mpiexec", "env", "exec"):
                index += 1
                continue
            break
        name, equals, value = text.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if name in ("m", "module"):
            break
        if equals:
            options[name] = Word(value, words[index].where, words[index].unset)
        elif name in _SWITCHES or index + 1 >= len(words):
            options[name] = Word("", words[index].where)
        else:
            index += 1
            options[name] = words[index]
        index += 1
    if words and posixpath.basename(words[0].text) in ("srun", "mpirun", "mpiexec", "exec", "env"):
        inner, _, _ = _options(words[1:])
        options = {**options, **inner}
    return options, words[index:], index


def _count(options: Mapping[str, Word], names: tuple[str, ...]) -> int | None:
    for name in names:
        if name in options:
            text = options[name].text
            # torchrun takes a range of nodes: the last is what the job is sized for.
            number = text.rpartition(":")[2]
            if number.isdigit() and len(number) < 7:
                return int(number)
    return None
