"""A problem as the page tells it: in the labels and units of the form, with links that ask again with one change.

Problems speak of fields of a body (``cluster.gpus = 32``); the page says ``32 GPUs``, and a click asks with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from planner.search.pins import PIN_NAMES
from planner.service.words import miss_text
from planner_api.page.form import CHOICES, LABELS, USUAL, Form, field_of
from planner_api.problems import FieldProblem, Problem

SHOWN_REASONS = 2
"""Rules that are quoted for a framework of which no candidate was legal."""


@dataclass(frozen=True)
class Piece:
    """Some words of a sentence, and where they lead."""

    text: str
    address: str = ""


Sentence = tuple[Piece, ...]


@dataclass(frozen=True)
class WrongField:
    """A field of the form that cannot be used."""

    name: str
    label: str
    detail: str


@dataclass(frozen=True)
class Told:
    """A problem in words of the page."""

    title: str
    detail: str
    allowed: Sentence = ()
    fields: tuple[WrongField, ...] = ()
    hint: Sentence = ()
    near: tuple[str, ...] = ()
    """What came nearest, a line a framework."""
    changes: tuple[Sentence, ...] = ()
    """Each is a change of the question that has a plan."""
    again: str = ""
    """Address that asks the same again, where that may help."""


def told(problem: Problem, asked: Form, again: str = "") -> Told:
    """The problem for whoever filled in the form."""
    details = problem.details or {}
    pointer = problem.errors[0].pointer if problem.errors else ""
    changes = details.get("relaxations", [])
    hint = None if problem.hint in changes else problem.hint
    fields = _wrong_fields(problem.errors, asked)
    return Told(
        title=problem.title,
        detail=_detail(problem, fields),
        allowed=_allowed(problem.allowed or "", pointer, asked),
        fields=fields,
        hint=_sentence(hint or "", pointer, asked),
        near=tuple(_near(details, hint or "")),
        changes=tuple(_sentence(change, "", asked) for change in changes),
        again=again,
    )


def _detail(problem: Problem, fields: tuple[WrongField, ...]) -> str:
    first = problem.errors[0] if problem.errors else None
    if first is None or not fields or not problem.detail.startswith(f"{first.pointer}: "):
        return _plain(problem.detail)
    more = f" (and {len(fields) - 1} more)" if fields[1:] else ""
    return f"{fields[0].label}: {fields[0].detail}{more}"


def _wrong_fields(errors: tuple[FieldProblem, ...], asked: Form) -> tuple[WrongField, ...]:
    """Each place once: of a value that may be a number or a text, both complain."""
    found: dict[str, WrongField] = {}
    for error in errors:
        name = _field(error.pointer, asked)
        if name is not None:
            said = _plain(error.detail)
            said = _in_percent(said) if name == "memory_margin" else said
            found.setdefault(error.pointer, WrongField(name, LABELS[name], said))
    return tuple(found.values())


def _field(pointer: str, asked: Form) -> str | None:
    name = field_of(pointer)
    return "config" if name == "model" and asked["config"] else name


_LIMIT = re.compile(r"(at least|at most|greater than|less than) (\d+(?:\.\d+)?)")


def _in_percent(said: str) -> str:
    return _LIMIT.sub(lambda match: f"{match[1]} {100 * float(match[2]):g} percent", said)


def _near(details: Mapping[str, Any], hint: str) -> Iterator[str]:
    """Of each framework the nearest miss, or the rules that no candidate keeps and that the hint does not quote."""
    nearest = details.get("nearest", {})
    for name, miss in nearest.items():
        yield f"{name}: nearest miss {miss_text(miss)}"
    for name, reasons in details.get("reasons", {}).items():
        if name not in nearest:
            first = list(reasons.values())[:SHOWN_REASONS]
            yield from (f"{name}: {_plain(reason)}" for reason in first if reason not in hint)


_SAID = {
    "model": "{}", "gpu": "{}", "gpus": "{} GPUs", "gpus_per_node": "{} GPUs a node", "nic_gbps": "{} Gbit/s of a NIC",
    "price": "{} dollars a GPU-hour", "seq_len": "a sequence length of {} tokens", "global_batch": "a batch of {}",
    "precision": "{}", "objective": "{}", "backend": "{}",
}  # fmt: skip
"""Field of the form -> its value in a sentence."""
_SAID_ELSEWHERE = {"cluster.host_memory_gib": "{} GiB of host memory a node", "cluster.nodes": "{} nodes"}
"""The same for what the form has no field for."""
_PHRASES: tuple[tuple[str, str], ...] = (
    ("[Ii]nput should be", "this must be"),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    (
        r"gpus\((\d+)\) % gpus_per_node\((\d+)\) = \d+: the GPUs do not fill whole nodes",
        r"\1 GPUs do not fill nodes of \2",
    ),
    (r" on (\d+) (\(\d+ nodes?\)) with cluster\.gpus = \1\b", r" with cluster.gpus = \1 \2"),
    ("ask again with POST /v1/plans", "ask again"),
    (
        "raise time_limit_s, or narrow the search with backend and pins",
        "fill in “Framework” or “Keep”: fewer plans are compared",
    ),
    ("raise time_limit_s to be told one, or ", ""),
    ("/v1/catalog/models", "the field “Model”"),
    ("/v1/catalog/gpus", "the field “GPU”"),
    ("/v1/catalog/backends", "the field “Framework”"),
    (
        r"the content of a config\.json or dimensions can be given too",
        "a config.json or dimensions can be pasted into “A model of your own”",
    ),
    ("the description of every field is in /openapi.json", ""),
    ("narrow the question: pins, backend, fewer GPUs", "narrow the question: “Keep”, “Framework”, fewer GPUs"),
    ("allowed values for backend", "allowed values for “Framework”"),
    ("allowed values for pins", "allowed values for “Keep”"),
)
_PLACED = r"(?:(?:cluster|job|pins)\.\w+|\bbackend) = [\w:+/.-]*[\w+]"
_SPECIAL = re.compile(
    rf"(?P<change>{_PLACED}(?:, {_PLACED})*)"
    r"|(?P<open>leave (?P<pin>\w+) open)"
    r"|(?<=did you mean )(?P<near>[^?\s]+(?: or [^?\s]+)*)(?=\?)"
    r"|(?P<field>(?:cluster|job)\.\w+)"
)


def _plain(text: str) -> str:
    """A sentence in the words of the form, without links."""
    return "".join(piece.text for piece in _sentence(text, "", Form({})))


def _sentence(text: str, pointer: str, asked: Form) -> Sentence:
    """A sentence in the words of the form; changes that it names become links.  ``pointer`` says what it is about."""
    for said, meant in _PHRASES:
        text = re.sub(said, meant, text)
    pieces: list[Piece] = []
    end = 0
    for match in _SPECIAL.finditer(text):
        pieces += [Piece(text[end : match.start()]), *_special(match, pointer, asked)]
        end = match.end()
    return tuple(piece for piece in (*pieces, Piece(text[end:])) if piece.text)


def _special(match: re.Match[str], pointer: str, asked: Form) -> Sentence:
    if match["change"]:
        return (_change(match["change"].split(", "), asked),)
    if match["open"]:
        pinned = match["pin"] in asked.pinned
        return (Piece(match[0], asked.address(pins=asked.pins_with(match["pin"], None)) if pinned else ""),)
    if match["near"]:
        return _listed(match["near"].split(" or "), " or ", pointer, asked)
    name = _field(f"/{match[0].replace('.', '/')}", asked)
    return (Piece(match[0].partition(".")[2].replace("_", " ") if name is None else f"“{LABELS[name]}”"),)


def _change(parts: list[str], asked: Form) -> Piece:
    """``cluster.gpus = 64, job.global_batch = 128`` as one link."""
    changed: dict[str, str] = {}
    said = [_part(part, changed, asked) for part in parts]
    whole = len(changed) == len(parts)
    return Piece(" and ".join(said), asked.address(**changed) if whole and asked.values else "")


def _part(part: str, changed: dict[str, str], asked: Form) -> str:
    """``cluster.gpus = 64`` in words; put into ``changed`` where the form has a field for it."""
    place, _, value = part.partition(" = ")
    name, said = field_of(f"/{place.replace('.', '/')}"), value
    if value.isdecimal() and len(value) < 16:
        said = f"{int(value):,}"
    if name in _SAID:
        changed[name] = value
        return _SAID[name].format(said)
    own = place.partition(".")[2]
    if name == "pins":
        changed[name] = asked.pins_with(own, value)
        return f"{own}={value}"
    return _SAID_ELSEWHERE.get(place, own.replace("_", " ") + " {}").format(said)


def _allowed(text: str, pointer: str, asked: Form) -> Sentence:
    """What a value may be; each of a few names is a link."""
    names = text.split(", ")
    short = all(re.fullmatch(r"[\w.-]+", name) for name in names)
    if short and field_of(pointer) in ("model", "gpu", "pins", *CHOICES):
        return _listed(names, ", ", pointer, asked)
    return _sentence(text, pointer, asked)


def _listed(names: list[str], between: str, pointer: str, asked: Form) -> Sentence:
    """Names that may stand in the field that ``pointer`` is about."""
    pieces: list[Piece] = []
    for name in names:
        pieces += [Piece(between), _instead(name, pointer, asked)]
    return tuple(pieces[1:])


def _instead(name: str, pointer: str, asked: Form) -> Piece:
    """One name in place of the one that cannot be used."""
    field = _field(pointer, asked)
    if field == "pins":
        pin = pointer.removeprefix("/pins").strip("/")
        pins = asked.pins_with(pin, name) if pin in PIN_NAMES else asked.pins_renamed(name, PIN_NAMES)
        return Piece(name, asked.address(pins=pins))
    if field is None or field == "config":
        return Piece(name)
    value = "" if USUAL.get(field) == name else name
    return Piece(dict(CHOICES.get(field, ())).get(value, name), asked.address(**{field: value}))
