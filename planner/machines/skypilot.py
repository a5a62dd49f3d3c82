"""Reads the resources of a SkyPilot task: which accelerators it would take, how many on a node, how many nodes.

SkyPilot's names carry its own defaults (``A100`` is the 40 GB card, ``V100`` the 16 GB one; sky/catalog)."""

from __future__ import annotations

import re
from typing import Any

from planner.errors import InputError
from planner.machines.documents import mapping, parse, word
from planner.machines.inventory import Inventory
from planner.machines.text import MAX_GPUS_PER_NODE, clean, note, whole
from planner.specs.finding import Finding
from planner.specs.problems import shown

TITLE = "SkyPilot task"
_ACCELERATORS = re.compile(r"^\s*[\"']?accelerators[\"']?\s*:", re.MULTILINE)
_OWN_DEFAULTS = {"a100": "A100-40GB", "v100": "V100-16GB"}


def recognises(text: str) -> bool:
    """Whether resources with accelerators are stated."""
    return _ACCELERATORS.search(text) is not None and re.search(r"resources[\"']?\s*:", text) is not None


def read(text: str, where: str = TITLE) -> Inventory:
    """Accelerators and nodes; InputError where no accelerator is stated."""
    for task in parse(clean(text), where):
        resources = mapping(task.get("resources"))
        stated = _alternatives(resources, where)
        if stated:
            nodes = whole(word(task.get("num_nodes", 1)))
            return Inventory(
                source=TITLE,
                node_count=nodes or None,
                product=stated[0][0] if len(stated) == 1 else None,
                gpus_per_node=stated[0][1] if len({count for _, count in stated}) == 1 else None,
                alternatives=stated if len(stated) > 1 else (),
                findings=_about(resources),
                unread=tuple(key for key in ("network_tier", "cpus", "memory") if word(resources.get(key))),
            )
    raise InputError(
        "no accelerator is stated", where=where, allowed="resources: accelerators: H100:8", hint="name it with --gpu"
    )


def _alternatives(resources: Any, where: str) -> tuple[tuple[str, int], ...]:
    """(accelerator, count) of a string, a list or a mapping, also inside ``any_of`` and ``ordered``."""
    found: dict[str, int] = {}
    choices = [
        resources,
        *(c for key in ("any_of", "ordered") for c in resources.get(key) or () if isinstance(c, dict)),
    ]
    for choice in choices:
        stated = choice.get("accelerators")
        if isinstance(stated, dict):
            # {H100:8} without a space is one key in YAML.
            items = [f"{word(name)}:{word(count)}".removesuffix(":") for name, count in stated.items()]
        else:
            items = [word(item) for item in (stated if isinstance(stated, list) else [stated])]
        for name, count in ((name, count or "1") for name, _, count in (item.partition(":") for item in items)):
            if name:
                found.setdefault(_OWN_DEFAULTS.get(name.lower(), name), _number(count, where))
    return tuple(found.items())


def _number(count: str, where: str) -> int:
    number = whole(count.removesuffix(".0"), MAX_GPUS_PER_NODE)
    if not number:
        raise InputError(
            "this number of accelerators cannot be used",
            where=f"{where}: accelerators",
            got=shown(count),
            allowed=f"a whole number from 1 to {MAX_GPUS_PER_NODE}",
            hint="write accelerators: H100:8",
        )
    return number


def _about(resources: Any) -> tuple[Finding, ...]:
    if resources.get("use_spot") is not True:
        return ()
    return (
        note("spot", "spot machines can be taken away: save checkpoints often", hint="the price is that of on-demand"),
    )
