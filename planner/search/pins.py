"""Values that the user fixes (``tp=8``): which names exist, how a value is read, and what it leaves of a list of
choices.

A value that cannot be used at all is refused here; one that a framework's rule forbids is refused in space.py, which
knows the rule.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from planner.errors import InputError
from planner.search.outcome import Pin

INTEGER_PINS = (
    "tp", "cp", "pp", "vpp", "ep", "etp", "dp", "zero_stage", "shard_degree", "secondary_shard_degree", "micro_batch",
    "grad_accum",
)  # fmt: skip
BOOLEAN_PINS = ("sequence_parallel",)
TEXT_PINS = ("pipeline_schedule", "recompute", "offload")
PIN_NAMES = (*INTEGER_PINS, *BOOLEAN_PINS, *TEXT_PINS)

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

Choice = TypeVar("Choice")


def read_pins(pins: Mapping[str, Pin]) -> dict[str, Pin]:
    """The pins with their values in the right type; InputError for an unknown name or an unreadable value."""
    return {name: _read(name, value) for name, value in pins.items()}


def _read(name: str, value: Pin) -> Pin:
    if name not in PIN_NAMES:
        near = difflib.get_close_matches(name, PIN_NAMES, n=1)
        raise InputError(
            f"there is no degree called {name!r} to pin",
            where=f"pins.{name}",
            allowed=", ".join(PIN_NAMES),
            hint=f"did you mean {near[0]}?" if near else "use one of the allowed names",
        )
    if name in BOOLEAN_PINS:
        if str(value).lower() not in _WORDS:
            raise _unreadable(name, value, "true or false")
        return _WORDS[str(value).lower()]
    if name in TEXT_PINS:
        return str(value).lower() if not isinstance(value, bool) else ("none" if not value else "full")
    try:
        number = int(value) if not isinstance(value, bool) else -1
    except ValueError:
        number = -1
    if number < 0 or (number == 0 and name not in ("zero_stage", "secondary_shard_degree")):
        raise _unreadable(name, value, "a positive whole number" if name != "zero_stage" else "0, 1, 2 or 3")
    return number


def _unreadable(name: str, value: Pin, allowed: str) -> InputError:
    return InputError(
        f"the value of {name} cannot be read", where=f"pins.{name}", got=str(value), allowed=allowed,
        hint=f"give {name} as {allowed}",
    )  # fmt: skip


def refused(pins: Mapping[str, Pin], name: str, why: str, allowed: Iterable[object]) -> InputError:
    """The error for a pinned value that is not among the choices at all."""
    listed = ", ".join(str(value) for value in allowed)
    return InputError(
        f"{name}={pins[name]} is not possible: {why}",
        where=f"pins.{name}",
        got=str(pins[name]),
        allowed=listed or "nothing",
        hint=f"use an allowed value or leave {name} open",
    )


def keep_pinned(pins: Mapping[str, Pin], name: str, choices: Sequence[Choice]) -> list[Choice]:
    """The choices that equal the pinned value; all of them without a pin."""
    return [choice for choice in choices if name not in pins or choice == pins[name]]


def places(names: Iterable[str]) -> str:
    """Where some pins stand, as errors say it."""
    return ", ".join(f"pins.{name}" for name in names)
