"""Megatron-Bridge: Megatron-LM's step, configured by a recipe and dotted overrides instead of arguments."""

from __future__ import annotations

from planner.backends.bridge_rules import BRIDGE_RULES
from planner.backends.megatron import Megatron


class MegatronBridge(Megatron):
    """Megatron-Bridge 0.6 with megatron-core 0.19; the step, its memory and its error are Megatron-LM's."""

    name = "megatron-bridge"
    title = "Megatron-Bridge"
    versions = "megatron-bridge >=0.6,<0.7"
    rules = (*Megatron.rules, *BRIDGE_RULES)
