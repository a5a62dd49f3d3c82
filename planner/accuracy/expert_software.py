"""Which software ran the experts of a measured mixture: dispatcher, overlap of its traffic, fused routing, CUDA graphs.

What a record states counts first, then the performance recipe attached to it; the rest follows from what the software
generation ran by default (``fused_routing``, ``_flex_by_default``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from planner.specs.cluster import Cluster
from planner.specs.measurement import MeasuredConfiguration

FUSED_SINCE = (25, 9)
"""Containers from 25.09 on (Megatron-Core 0.12 and later, Megatron-Bridge) fuse router and token permutation."""
FLEX_SINCE = (25, 11)
"""Megatron-Bridge recipes from 25.11 on use HybridEP and partial graphs on NVL72 machines; before, and elsewhere unless
they say so, NCCL's all-to-all and no graphs (scripts/performance/configs of v0.1.0 and v0.2.0)."""
_CONTAINER = re.compile(r"(\d{2})\.(\d{2})")
_FLEX = ("deepep", "hybridep", "flex")
_NVL72_DOMAIN = 72


def expert_habits(run: MeasuredConfiguration, cluster: Cluster) -> dict[str, Any]:
    """Changes to the habits of a Megatron stack for one record of a mixture of experts."""
    return {
        "expert_dispatch": "flex" if _flex(run, cluster) else "all-to-all",
        "expert_overlap": _overlapped(run),
        "fused_routing": fused_routing(run),
        "cuda_graphs": graphs_of(run, cluster),
    }


def generation(run: MeasuredConfiguration) -> tuple[int, int] | None:
    """Year and month of the container; None where the record names none."""
    found = _CONTAINER.search(f"{run.extra.get('container') or ''} {run.version or ''}")
    return (int(found[1]), int(found[2])) if found else None


def fused_routing(run: MeasuredConfiguration) -> bool:
    """Whether router and permutation kernels are fused: stated, or by the age of the software."""
    stated = run.extra.get("router_fusion")
    if stated is not None:
        return bool(stated)
    age = generation(run)
    if age is not None:
        return age >= FUSED_SINCE
    early = re.match(r"core v0\.(\d+)", run.version or "")
    if early is not None:
        return int(early[1]) >= 12
    return not (run.framework or "").lower().startswith("nemo")


def graphs_of(run: MeasuredConfiguration, cluster: Cluster) -> Literal["none", "partial", "full"]:
    """What runs as CUDA graphs."""
    words = (run.cuda_graphs or "").lower()
    if words:
        if words.startswith("none"):
            return "none"
        return "full" if "full_iteration" in words else "partial"
    return "partial" if _flex_by_default(run, cluster) else "none"


def _flex(run: MeasuredConfiguration, cluster: Cluster) -> bool:
    """Whether tokens travel once to each rank that needs them."""
    words = str(run.extra.get("dispatcher") or "").lower()
    if words:
        return words.startswith(_FLEX)
    recipe = _recipe(run)
    if recipe:
        backend = recipe.get("moe_flex_dispatcher_backend", recipe.get("model.moe_flex_dispatcher_backend"))
        return any(word in str(backend).lower() for word in _FLEX)
    return _flex_by_default(run, cluster)


def _flex_by_default(run: MeasuredConfiguration, cluster: Cluster) -> bool:
    """Whether Megatron-Bridge's own recipes of that age use HybridEP and partial graphs on this machine."""
    age, recent = generation(run), FLEX_SINCE
    bridge = (run.framework or "").lower().startswith("megatron-bridge")
    return bridge and not _recipe(run) and (age or recent) >= recent and cluster.domain_gpus >= _NVL72_DOMAIN


def _overlapped(run: MeasuredConfiguration) -> bool:
    """Whether expert traffic runs beside another micro-batch's compute; with stages it needs interleaving."""
    recipe, extra = _recipe(run), run.extra
    stated = (
        extra.get("ep_overlap_1f1b"),
        extra.get("moe_a2a_overlap_1f1b"),
        recipe.get("moe_a2a_overlap"),
        recipe.get("comm_overlap.overlap_moe_expert_parallel_comm"),
    )
    asked = any(str(value).lower() == "true" for value in stated)
    return asked and ((run.pp or 1) == 1 or (run.vpp or 1) > 1)


def _recipe(run: MeasuredConfiguration) -> Mapping[str, Any]:
    """Settings of the performance recipe that the record was matched with, by their names there."""
    recipe = run.extra.get("recipe")
    found: dict[str, Any] = dict(run.extra.get("recipe_settings") or {})
    if isinstance(recipe, Mapping):
        found |= {key: value for key, value in recipe.items() if key != "settings"}
        found |= dict(recipe.get("settings") or {})
    return found
