"""What a framework's renderer hands over: its own files and what the launch script and the guide need to know.

Plain data; the package's front door puts the files of one plan together from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.render.launch import Launch
from planner.render.topology import Topology


@dataclass(frozen=True)
class Bundle:
    """Everything that differs between frameworks."""

    files: Mapping[str, str]
    """Relative path -> text."""
    launch: Launch
    topology: Topology
    files_told: Mapping[str, str]
    """What each of the files is, for the guide."""
    setup: tuple[str, ...]
    """What has to be installed or set before the first run."""
    watch: tuple[str, ...]
    """What to look at in the first steps."""
    out_of_memory: tuple[str, ...]
    """What to change first, cheapest first."""
    notes: tuple[str, ...] = ()
    """What the framework's configuration cannot express or leaves open."""
    expert_topology: Topology | None = field(default=None)
