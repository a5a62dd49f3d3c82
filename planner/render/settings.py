"""What a plan's own configuration files set, name by name, so that two plans can be told apart in their framework's
words.

Reads the texts that the renderers wrote, whose layout is known; files of people are read by ``planner.reading``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml


@dataclass(frozen=True)
class Setting:
    """One value of one file."""

    file: str
    name: str
    text: str
    """As the file spells it: ``--micro-batch-size 2``, ``zero_optimization.stage: 2``, ``RECOMPUTE = "none"``."""


def settings(files: Mapping[str, str]) -> dict[tuple[str, str], Setting]:
    """Every setting of rendered files by file and name; programs beside them have none but their constants."""
    return {(each.file, each.name): each for file, text in files.items() for each in _of_file(file, text)}


def _of_file(file: str, text: str) -> Iterator[Setting]:
    if file.endswith(".json"):
        yield from _nested(file, json.loads(text))
    elif file.endswith(".yaml"):
        yield from _nested(file, yaml.safe_load(text))
    else:
        for line in text.splitlines():
            match = next((match for form in _LINES if (match := form.match(line))), None)
            if match is not None:
                yield Setting(file, match["name"], match["text"])


_REMARK = r"\s*(?:\s#.*)?$"
_LINES = (
    re.compile(rf"\s*(?P<text>(?P<name>--[\w.-]+)(?: .*?)?){_REMARK}"),
    re.compile(rf"(?P<text>(?P<name>[A-Z][A-Z_0-9]*) = .*?){_REMARK}"),
    re.compile(rf"(?P<text>(?P<name>[\w.]+)=.*?){_REMARK}"),
)
"""An option with its value, a constant, and an override."""


def _nested(file: str, value: Any, path: tuple[str, ...] = ()) -> Iterator[Setting]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _nested(file, inner, (*path, str(name)))
    else:
        name = ".".join(path)
        yield Setting(file, name, f"{name}: {json.dumps(value)}")
