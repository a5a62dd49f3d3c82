"""YAML as plain values together with the line of every key, so that findings can say where they stand.

Nothing in a file is executed, and every way in which it can be malformed ends in one error that names file and line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from planner.errors import InputError
from planner.reading.texts.lenient_json import Path


@dataclass(frozen=True)
class YamlFile:
    """One document."""

    name: str
    value: Any
    lines: dict[Path, int]
    """Line (from 1) of the key at each path, as far as mappings and lists reach without repeating themselves."""
    doubled: tuple[Path, ...]
    """Keys that stand twice in one mapping; the loader keeps the last."""

    def where(self, *path: str | int) -> str:
        """``file:line`` of the key, or of the nearest one above it that the file has."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}"
        return self.name


def load_yaml(name: str, text: str) -> YamlFile:
    """The document in ``text``; InputError with the line where it is none."""
    lines: dict[Path, int] = {}
    doubled: list[Path] = []
    with _readable(name, text):
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _walk(root, (), lines, doubled, set())
        value = yaml.safe_load(text)
    return YamlFile(name, value, lines, tuple(doubled))


def compose_yaml(name: str, text: str) -> yaml.Node | None:
    """The nodes of the document in ``text``, for readers that make their own values of them."""
    with _readable(name, text):
        return yaml.compose(text, Loader=yaml.SafeLoader)


def line_shown(text: str, number: int) -> str:
    """A line (from 1) as an error message may print it."""
    lines = text.splitlines()
    return repr(lines[number - 1].strip()[:80]) if 0 < number <= len(lines) else "end of file"


@contextmanager
def _readable(name: str, text: str) -> Iterator[None]:
    """What PyYAML raises, as one error."""
    hint = "check indentation, quotes and brackets there"
    try:
        yield
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        reason = error.problem or "malformed"
        raise InputError(
            f"this is not YAML: {reason}", where=f"{name}:{line}", got=line_shown(text, line), hint=hint
        ) from error
    # Constructors of dates, huge integers and deep nesting raise the others.
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, TypeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"this is not YAML: {reason}", where=name, hint=hint) from error


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], doubled: list[Path], seen: set[int]) -> None:
    # Aliases make one node appear many times, or inside itself.
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            place = (*path, str(key.value))
            if place in lines:
                doubled.append(place)
            lines[place] = key.start_mark.line + 1
            _walk(child, place, lines, doubled, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            lines[(*path, index)] = child.start_mark.line + 1
            _walk(child, (*path, index), lines, doubled, seen)
