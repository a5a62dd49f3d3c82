"""Strategies in one line of words, the same for the terminal and for reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.specs.plan import Plan
from planner.specs.strategy import Recompute, Strategy
from planner.units import gib, percent


def strategy_text(plan: Plan) -> str:
    """The strategy in one line; degrees of 1 are left out."""
    s = plan.strategy
    text = f"{plan.backend}: {mesh_words(s)}" + (f" over {s.shard_degree}" if s.shard_degree > 1 else "")
    if s.secondary_shard_degree:
        text += f" (second shard over {s.secondary_shard_degree})"
    text += f", micro-batch {s.micro_batch} x {s.grad_accum}, recompute {recompute_text(s.recompute)}"
    return text + (f", offload {offload_text(s)}" if s.offload.device != "none" else "")


def mesh_words(s: Strategy) -> str:
    """``TP 8 + SP, PP 4, DP 2, ZeRO 1``; degrees of 1 are left out."""
    degrees = [("TP", s.tp), ("CP", s.cp), ("PP", s.pp), ("VPP", s.vpp), ("EP", s.ep), ("ETP", s.etp), ("DP", s.dp)]
    words = [f"{name} {value}" for name, value in degrees if value > 1 and not (name == "ETP" and s.ep == 1)]
    if s.tp > 1 and s.sequence_parallel:
        words[0] += " + SP"
    return f"{', '.join(words) or 'one GPU'}, ZeRO {s.zero_stage}"


def recompute_text(recompute: Recompute) -> str:
    """``none``, ``full``, ``full 3/stage`` or the modules of selective recomputation."""
    if recompute.mode == "full" and recompute.layers_per_stage is not None:
        return f"full {max(recompute.layers_per_stage)}/stage"
    if recompute.mode == "selective" and recompute.modules:
        return "+".join(recompute.modules)
    return recompute.mode


def offload_text(strategy: Strategy) -> str:
    """What is offloaded where: ``50 % of the optimizer to cpu``."""
    offload = strategy.offload
    text = f"{percent(offload.optimizer)} of the optimizer to {offload.device}"
    return text + (f" and the weights to {offload.parameters}" if offload.parameters != "none" else "")


def miss_text(miss: Mapping[str, Any]) -> str:
    """What the nearest miss of a question without a plan lacks: ``needs 98.0 GiB of 79.1 GiB on a GPU (tp=8)``."""
    place = "on a GPU" if miss["where"] == "gpu" else "of host memory a node"
    strategy = " ".join(f"{field}={value}" for field, value in miss["strategy"].items())
    return f"needs {gib(miss['needed_bytes'])} of {gib(miss['limit_bytes'])} {place} ({strategy})"
