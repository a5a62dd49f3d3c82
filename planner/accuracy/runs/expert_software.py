"""Which software ran the experts of a measured mixture: dispatcher, overlap of its traffic, padding, CUDA graphs.

What a record states counts first, then the performance recipe attached to it; the rest follows from what the software
generation ran by default (``PADDED_UNTIL``, ``FLEX_SINCE``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from planner.accuracy.runs.stated import group, settings
from planner.specs.cluster import Cluster
from planner.specs.measurement import MeasuredConfiguration

FLEX_SINCE = (25, 11)
"""Megatron-Bridge recipes from 25.11 on use HybridEP and partial graphs on NVL72 machines, and elsewhere overlap the
all-to-all with compute where chunks interleave (scripts/performance/configs of v0.2.0)."""
PADDED_UNTIL = (25, 9)
"""Performance recipes of NeMo and of Megatron-Bridge 25.09 gave every expert a fixed number of tokens; later ones drop
none, nor did NeMo's recipe of DeepSeek-V3, whose router is balanced by a bias."""
_CONTAINER = re.compile(r"(?<![\d.])(2\d)\.(0\d|1[0-2])(?!\d)")
_FLEX = ("deepep", "hybridep", "flex")
_NVL72_DOMAIN = 72
_OVERLAPS_WITHIN_LAYERS = "megascale-moe"
"""MegaScale-MoE runs expert traffic beside other operators of the same micro-batch (arXiv 2505.11432)."""


def expert_habits(run: MeasuredConfiguration, cluster: Cluster, *, latent_attention: bool = False) -> dict[str, Any]:
    """Changes to the habits of a stack for one record of a mixture of experts, DeepSeek's design or another."""
    return {
        "expert_dispatch": _dispatch(run, cluster),
        "expert_overlap": _overlapped(run, cluster),
        "padded_experts": padded(run, latent_attention=latent_attention),
        "balanced_routing": balanced(run),
        "fused_expert_mlp": _fused_mlp(run),
        "cuda_graphs": graphs_of(run, cluster),
    }


def _fused_mlp(run: MeasuredConfiguration) -> bool:
    """Whether activation and quantisation run inside the grouped GEMM: stated, or with whole-iteration graphs, which
    came with it (recipes of 26.06: moe_mlp_glu_interleave_size 32)."""
    stated = run.extra.get("cutedsl_fused_grouped_mlp")
    return bool(stated) if stated is not None else "full_iteration" in (run.cuda_graphs or "")


def generation(run: MeasuredConfiguration) -> tuple[int, int] | None:
    """Year and month of the container; None where the record names none."""
    found = _CONTAINER.search(f"{run.extra.get('container') or ''} {run.version or ''}")
    return (int(found[1]), int(found[2])) if found else None


def padded(run: MeasuredConfiguration, *, latent_attention: bool = False) -> bool:
    """Whether every expert computes a fixed number of tokens: stated, or by the age of the recipes (NeMo itself ended
    with 25.09, so its records need not name a container)."""
    words = str(run.extra.get("moe_routing") or "").lower()
    if "drop" in words and "dropless" not in words:
        return True
    if (run.framework or "").lower().startswith("nemo"):
        return not latent_attention
    age = generation(run)
    return _bridge(run) and age is not None and age <= PADDED_UNTIL


def balanced(run: MeasuredConfiguration) -> bool:
    """Whether experts get equal shares: said so, fixed by a capacity, or a benchmark, which forces it; fine-tuning and
    verification runs route real data."""
    stated = [run.extra.get(name) for name in ("force_balance", "forced_balance") if run.extra.get(name) is not None]
    if stated:
        return any(stated)
    fine_tuned = str(run.extra.get("task") or "pretrain") != "pretrain"
    return padded(run) or not (fine_tuned or run.extra.get("tuned") is False)


def graphs_of(run: MeasuredConfiguration, cluster: Cluster) -> Literal["none", "partial", "full"]:
    """What runs as CUDA graphs."""
    words = (run.cuda_graphs or "").lower()
    if words:
        if words.startswith("none"):
            return "none"
        return "full" if "full_iteration" in words else "partial"
    hybrid = "hybridep" in str(run.extra.get("dispatcher") or "").lower()
    return "partial" if _unread_recipe(run) and (hybrid or cluster.domain_gpus >= _NVL72_DOMAIN) else "none"


def _dispatch(run: MeasuredConfiguration, cluster: Cluster) -> Literal["all-to-all", "flex-between-domains", "flex"]:
    """How tokens travel to their experts."""
    words = str(run.extra.get("dispatcher") or run.extra.get("kernels") or "").lower()
    recipe = _recipe(run)
    if not words and recipe:
        words = str(
            recipe.get("moe_flex_dispatcher_backend", recipe.get("model.moe_flex_dispatcher_backend")) or "none"
        )
    if words:
        return "flex" if any(name in words.lower() for name in _FLEX) else "all-to-all"
    if _unread_recipe(run) and (generation(run) or FLEX_SINCE) >= FLEX_SINCE and cluster.domain_gpus >= _NVL72_DOMAIN:
        return "flex"
    # DeepEP is what Megatron-Bridge used where expert groups leave the fast links.
    return "flex-between-domains" if _bridge(run) else "all-to-all"


def _overlapped(run: MeasuredConfiguration, cluster: Cluster) -> bool:
    """Whether expert traffic runs beside another micro-batch's compute; with stages it needs interleaving."""
    recipe, extra = _recipe(run), run.extra
    if (run.framework or "").lower().startswith(_OVERLAPS_WITHIN_LAYERS):
        return True
    stated = (
        extra.get("ep_overlap_1f1b"),
        extra.get("moe_a2a_overlap_1f1b"),
        recipe.get("moe_a2a_overlap"),
        recipe.get("comm_overlap.overlap_moe_expert_parallel_comm"),
    )
    if any(value is not None for value in stated):
        asked = any(str(value).lower() == "true" for value in stated)
    else:
        # Whole-iteration graphs came with it in every recipe, and recipes off NVL72 interleave for its sake.
        off_nvl72 = (run.vpp or 1) > 1 and cluster.domain_gpus < _NVL72_DOMAIN
        asked = "full_iteration" in (run.cuda_graphs or "") or (_unread_recipe(run) and off_nvl72)
    return asked and ((run.pp or 1) == 1 or (run.vpp or 1) > 1)


def _bridge(run: MeasuredConfiguration) -> bool:
    return (run.framework or "").lower().startswith("megatron-bridge")


def _unread_recipe(run: MeasuredConfiguration) -> bool:
    """A Megatron-Bridge run whose recipe is not in the record: what recipes usually set is taken."""
    return _bridge(run) and not _recipe(run)


def _recipe(run: MeasuredConfiguration) -> Mapping[str, Any]:
    """Settings of the performance recipe that the record was matched with, by their names there."""
    recipe = settings(run, "recipe")
    named = {key: value for key, value in recipe.items() if key != "settings"}
    return {**settings(run, "recipe_settings"), **named, **group(recipe.get("settings"))}
