"""Host lists of Slurm and of shells: which hosts ``rack1-n[08-11],rack2-n[01-02].cluster`` names, which are missing.

Written here because python-hostlist is under the GPL, which a package under Apache-2.0 cannot depend on, and
ClusterShell (LGPL) gives sets: order and repeats are lost, and ``@``, ``!`` and ``&`` in the text become operators and
look-ups of groups."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

from planner.errors import InputError
from planner.specs.problems import shown

MAX_HOSTS = 100_000
"""Hosts of one list; the largest machines have about ten thousand nodes."""
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_NAME = re.compile(r"[A-Za-z0-9_.:-]*")
_NUMBER = re.compile(r"[0-9]+")
_MOST_GAPS = 1000

HINT = "a host list looks like node[001-004,7],login1"


def expand(text: str, where: str = "host list") -> tuple[str, ...]:
    """Every host in the order of the list; InputError with the part that is wrong."""
    hosts: list[str] = []
    for part in _split(text, where):
        pieces = _pieces(part, where)
        if len(hosts) + math.prod(len(piece) for piece in pieces) > MAX_HOSTS:
            raise _error("the list names too many hosts", part, where)
        hosts += ["".join(choice) for choice in itertools.product(*pieces)]
    if not hosts:
        raise _error("the list is empty", text, where)
    return tuple(hosts)


def _error(message: str, part: str, where: str) -> InputError:
    return InputError(message, where=where, got=shown(part), allowed=f"at most {MAX_HOSTS} host names", hint=HINT)


def _split(text: str, where: str) -> list[str]:
    """Parts at commas or white space outside brackets."""
    parts, current, depth = [], "", 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _error("the brackets do not match", text, where)
        if depth == 0 and (character == "," or character.isspace()):
            parts.append(current)
            current = ""
        else:
            current += character
    if depth:
        raise _error("a bracket is not closed", text, where)
    return [part for part in (*parts, current) if part]


def _pieces(part: str, where: str) -> list[Sequence[str]]:
    """Choices for each stretch of a part: plain text has one, a bracket as many as it lists."""
    pieces: list[Sequence[str]] = []
    for index, stretch in enumerate(re.split(r"\[([^\[\]]*)\]", part)):
        if index % 2:
            pieces.append(_bracket(stretch, part, where))
        elif not _NAME.fullmatch(stretch):
            raise _error("this is not a host name", part, where)
        elif stretch:
            pieces.append((stretch,))
    return pieces


def _bracket(content: str, part: str, where: str) -> list[str]:
    """``01-03,7`` as 01, 02, 03, 7: the first number of a range says how many digits are kept."""
    numbers: list[str] = []
    for item in content.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise _error("a bracket holds numbers and ranges", part, where)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_HOSTS:
            raise _error("a range runs from a number to a larger one", part, where)
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def holes(hosts: Iterable[str]) -> tuple[str, ...]:
    """Hosts that the numbering skips: names alike but for their last number, between the lowest and the highest.

    Long gaps are other racks or ranges, not missing machines: only gaps shorter than the hosts around them count."""
    families: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for host in dict.fromkeys(hosts):
        short, dot, suffix = host.partition(".")
        found = list(_NUMBER.finditer(short))
        if found and len(found[-1][0]) <= 18:
            digits = found[-1]
            key = (short[: digits.start()], short[digits.end() :] + dot + suffix)
            families.setdefault(key, []).append((int(digits[0]), len(digits[0])))
    missing: list[str] = []
    for (before, after), members in families.items():
        members.sort()
        for (low, width), (high, _) in itertools.pairwise(members):
            if 1 < high - low <= min(len(members), _MOST_GAPS):
                missing += [f"{before}{str(number).zfill(width)}{after}" for number in range(low + 1, high)]
    return tuple(missing[:_MOST_GAPS])
