"""One question to the search: everything fixed, and the values that the user pins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.cost.evaluate import CostContext
from planner.search.outcome import Pin


@dataclass(frozen=True)
class Problem:
    """Find the best strategy of ``context.backend`` under the pins."""

    context: CostContext
    pins: Mapping[str, Pin] = field(default_factory=dict)
