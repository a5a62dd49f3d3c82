"""Reads pins (``tp=8``): values of the strategy that the search must keep."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import get_args

from planner.errors import InputError
from planner.service.inputs import checked_int, checked_text, one_of
from planner.service.requests import PinValue
from planner.specs.problems import shown
from planner.specs.strategy import OffloadDevice, Schedule

NUMBERS = {
    "tp": 1,
    "cp": 1,
    "pp": 1,
    "vpp": 1,
    "ep": 1,
    "etp": 1,
    "dp": 1,
    "zero_stage": 0,
    "shard_degree": 1,
    "secondary_shard_degree": 0,
    "micro_batch": 1,
    "grad_accum": 1,
}
"""Pin -> least value."""
WORDS = {
    "pipeline_schedule": get_args(Schedule),
    "offload": get_args(OffloadDevice),
}
FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_NAME = re.compile(r"[\w-]{1,40}")
NAMES = (*NUMBERS, "sequence_parallel", "recompute", *WORDS)


def parse_pins(texts: Iterable[str]) -> dict[str, PinValue]:
    """``("tp=8,zero_stage=1", "sequence_parallel=true")`` as a mapping, sorted by name; contradictions are refused."""
    pins: dict[str, PinValue] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        spelt, equals, value = (piece.strip() for piece in part.partition("="))
        name, where = spelt.replace("-", "_"), f"--pin {spelt}"
        if not equals or not value:
            raise InputError(
                "a pin is NAME=VALUE",
                where="--pin",
                got=shown(part),
                allowed=", ".join(NAMES),
                hint="for example --pin tp=8",
            )
        one_of(name, where if _NAME.fullmatch(spelt) else "--pin", NAMES)
        read = _value(name, value, where)
        if pins.setdefault(name, read) != read:
            raise InputError(
                f"{name} is pinned twice", where=where, got=f"{pins[name]} and {read}", hint="keep one of them"
            )
    return dict(sorted(pins.items()))


def _value(name: str, text: str, where: str) -> PinValue:
    if name in WORDS:
        return one_of(text, where, WORDS[name])
    if name == "recompute":
        # A mode, or a framework's own kind: which ones exist depends on model and framework, so the search decides.
        return checked_text(text, where, "for example --pin recompute=full")[:100]
    if name == "sequence_parallel":
        return FLAGS[one_of(text.lower(), where, FLAGS)]
    low, high = NUMBERS[name], 3 if name == "zero_stage" else 1_000_000
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise InputError(
            "this number cannot be used",
            where=where,
            got=shown(text),
            allowed=f"a whole number from {low} to {high}",
            hint="for example --pin tp=8",
        )
    return checked_int(int(text), where, low, high)
