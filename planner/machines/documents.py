"""JSON and YAML documents of schedulers: parsed as plain data, in any number, whatever was pasted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from planner.errors import InputError
from planner.machines.text import printable

_WHITE = re.compile(r"\s*")
MAX_YAML_BYTES = 4_000_000
"""PyYAML needs a hundred times the text in memory; Kubernetes writes large lists as JSON on request."""


def parse(text: str, where: str) -> list[dict[str, Any]]:
    """The mappings of a JSON or YAML text, which may hold several documents; InputError where it is neither."""
    stripped = text.strip()
    try:
        content = _json(stripped) if stripped.startswith(("{", "[")) else None
        if content is None:
            if len(stripped) > MAX_YAML_BYTES:
                raise InputError("the YAML text is too large", where=where, hint="ask for JSON instead: -o json")
            # The loader in C does not guard its stack against deep nesting; this one does.
            content = list(yaml.safe_load_all(stripped))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as problem:
        reason = " ".join(str(problem).split())[:200]
        raise InputError(
            f"the text cannot be parsed: {reason}", where=where, allowed="JSON or YAML", hint="paste the whole output"
        ) from problem
    return [document for document in content if isinstance(document, dict)]


def _json(text: str) -> list[Any] | None:
    """The values of one or several JSON documents; None where the first is something else (YAML in flow style)."""
    decoder = json.JSONDecoder()
    documents: list[Any] = []
    position = 0
    while position < len(text):
        try:
            document, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            if documents or len(text) > MAX_YAML_BYTES:
                raise
            return None
        documents += document if isinstance(document, list) else [document]
        position = _WHITE.match(text, position).end()  # type: ignore[union-attr]
    return documents


def mapping(value: object) -> Mapping[str, Any]:
    """A mapping with keys that are printable text, or nothing."""
    if not isinstance(value, dict):
        return {}
    return {key: entry for key, entry in value.items() if isinstance(key, str) and key.isprintable()}


def entries(value: object) -> Iterator[Mapping[str, Any]]:
    """The mappings of a list."""
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, dict):
            yield mapping(entry)


def word(value: object) -> str:
    """A scalar as text; nothing for anything else."""
    if isinstance(value, str):
        return printable(value)
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30 else ""
