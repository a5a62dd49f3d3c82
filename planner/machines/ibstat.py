"""Reads ``ibstat``: the network cards that can carry a job, their rate and whether they are up.

Ports that are down do not count, and of those that are up only the fastest kind: slower ones serve storage or
management."""

from __future__ import annotations

import re
from dataclasses import replace

from planner.errors import InputError
from planner.machines.inventory import Inventory, Nic
from planner.machines.text import clean, listed, note, warning
from planner.specs.finding import Finding
from planner.units import counted

TITLE = "ibstat"
HINT = "paste the whole output of `ibstat`"
MAX_PORTS = 1024

_CARD = re.compile(r"^[\s>]*CA '([^']{1,64})'")
_PORT = re.compile(r"^[\s>]*Port ([0-9]{1,3}):")
_LINE = re.compile(r"^[\s>]*([A-Za-z ]+?):\s*(.*?)\s*$")
_RATE = re.compile(r"^([0-9]{1,6}(?:\.[0-9]{1,3})?)")
_BROKEN = re.compile(r"^(?:ibpanic|ibwarn|ibstat)\b.*$", re.MULTILINE)
_BROKEN_CARD = re.compile(r"device '([^']+)'")


def recognises(text: str) -> bool:
    """Whether a card is listed."""
    return any(_CARD.match(line) for line in clean(text).splitlines())


def read(text: str, where: str = TITLE) -> Inventory:
    """Every port; InputError where none is listed."""
    plain = clean(text)
    ports = _ports(plain)
    broken = _BROKEN.search(plain)
    if not ports:
        raise InputError(
            "no port is listed",
            where=where,
            got=broken[0][:80] if broken else None,
            allowed="CA 'mlx5_0' ...",
            hint=HINT,
        )
    findings = _about(ports)
    if broken is not None:
        card = _BROKEN_CARD.search(broken[0])
        findings.append(
            warning(
                "list-cut-short",
                "the list ends in an error" + (f" at {card[1]}" if card else "") + ": there may be more cards",
                hint="run ibstat as root, or name the count: --nics N",
            )
        )
    return Inventory(source=TITLE, nics=tuple(ports), findings=tuple(findings))


def _ports(text: str) -> list[Nic]:
    """Ports in natural order of names; a card with several ports has one entry for each."""
    cards: dict[str, list[Nic]] = {}
    name = ""
    for line in text.splitlines():
        card = _CARD.match(line)
        if card is not None:
            name = card[1]
            cards.setdefault(name, [])
        elif name and _PORT.match(line) and sum(map(len, cards.values())) < MAX_PORTS:
            cards[name].append(Nic(name=name))
        elif name and cards[name]:
            fact = _LINE.match(line)
            if fact is not None:
                cards[name][-1] = _with(cards[name][-1], fact[1].lower(), fact[2])
    ports = [
        replace(port, name=f"{name}:{number}") if len(members) > 1 else port
        for name, members in cards.items()
        for number, port in enumerate(members, start=1)
    ]
    return sorted(ports, key=lambda port: _natural(port.name))


def _natural(name: str) -> list[int | str]:
    """Text and numbers in turn, so that mlx5_10 follows mlx5_9."""
    return [int(part) if turn % 2 else part for turn, part in enumerate(re.split(r"([0-9]{1,18})", name))]


def _with(port: Nic, key: str, value: str) -> Nic:
    if key == "state":
        return replace(port, active=value.lower() == "active")
    if key == "rate":
        rate = _RATE.match(value)
        return replace(port, gbps=float(rate[1]) if rate and float(rate[1]) > 0 else None)
    if key == "link layer":
        return replace(port, layer=value or None)
    return port


def _about(ports: list[Nic]) -> list[Finding]:
    findings = []
    down = [port.name for port in ports if port.active is False]
    if down:
        findings.append(
            warning(
                "nic-down",
                f"{counted(len(down), 'port')} down, not counted",
                where=listed(down),
                hint="check the cable",
            )
        )
    up = [port for port in ports if port.active is not False and port.gbps is not None]
    rates = sorted({port.gbps for port in up if port.gbps is not None})
    if len(rates) > 1:
        slow = [
            f"{port.name} ({port.gbps:g} Gbit/s, {port.layer or 'unknown layer'})"
            for port in up
            if port.gbps != rates[-1]
        ]
        findings.append(
            note(
                "nic-slower",
                f"ports run at {rates[0]:g} to {rates[-1]:g} Gbit/s; only the fastest are counted",
                where=listed(slow),
                hint="if the slower ones carry the job as well: --nics N --nic-gbps RATE",
            )
        )
    roce = [port.name for port in up if (port.layer or "").lower() == "ethernet" and port.gbps == rates[-1]]
    if roce:
        findings.append(
            note(
                "nic-ethernet",
                "the fastest ports are Ethernet: RDMA over them (RoCE) needs a lossless network",
                where=listed(roce),
                hint="NCCL_IB_GID_INDEX must name a RoCE v2 address",
            )
        )
    return findings
