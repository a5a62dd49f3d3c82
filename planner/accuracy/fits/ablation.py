"""What each effect of the model is worth: the error on measured step times when it is left out.

An effect is dropped by constants that neutralise it or by clearing its coefficients; nothing is fitted again, but a
second figure lets every class find its own overall rate, so that only what the effect explains remains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.accuracy.predict import predict
from planner.accuracy.runs.interpret import Case
from planner.cost.constants import ConstantTable
from planner.cost.stage_model import StageModel
from planner.specs.accuracy import EffectRow
from planner.specs.batch import FloatArray

_NEVER = 1e9
"""A rate at which nothing takes time."""


def _unchanged(model: StageModel) -> StageModel:
    return model


def _cleared(*names: str) -> Callable[[StageModel], StageModel]:
    def clear(model: StageModel) -> StageModel:
        return replace(model, **{name: np.zeros_like(getattr(model, name)) for name in names})

    return clear


@dataclass(frozen=True)
class Effect:
    """One cause of time, and how to leave it out."""

    name: str
    constants: Mapping[str, float] = field(default_factory=dict)
    """Value of each constant, for every stack and accelerator, at which the effect vanishes."""
    adjust: Callable[[StageModel], StageModel] = _unchanged


EFFECTS = (
    Effect("pipeline bubble", adjust=_cleared("others_weight")),
    Effect("stage-to-stage transfers", adjust=_cleared("p2p_time_s")),
    Effect("output head and loss", adjust=_cleared("last_time_s")),
    Effect("traffic inside the fast domain", {"fabric_bus_share": _NEVER, "fabric_latency_s": 0.0}),
    Effect(
        "traffic between nodes",
        {"network_share": _NEVER, "network_latency_s": 0.0, "network_hop_s": 0.0, "network_half_message_bytes": 0.0},
    ),
    Effect("small messages are slow", {"fabric_half_message_bytes": 0.0, "network_half_message_bytes": 0.0}),
    Effect(
        "gradient and parameter traffic once a step",
        adjust=_cleared("layer_reduce_time_s", "first_reduce_time_s", "last_reduce_time_s", "reduce_floor_s"),
    ),
    Effect(
        "optimizer step", adjust=_cleared("layer_optimizer_time_s", "first_optimizer_time_s", "last_optimizer_time_s")
    ),
    Effect("matrix shape (K, M, N)", {"gemm_half_k": 0.0, "gemm_half_mn": 0.0}),
    Effect("attention length and occupancy", {"attention_half_length": 0.0, "attention_half_blocks_per_sm": 0.0}),
    Effect("memory-bound kernels", {"stream_share": _NEVER}),
    Effect("unfused kernels of eager stacks", {"eager_traffic_factor": 1.0}),
    Effect("older attention kernels", {"flash2_attention_factor": 1.0}),
    Effect("host launch time", {"launch_s": 0.0, "moe_host_s": 0.0}),
    Effect("tokens per expert", {"expert_half_tokens": 0.0}),
    Effect("compute slowed by traffic beside it", {"overlap_slowdown": 0.0}),
    Effect("tensor-parallel overlap", {"tensor_overlap_share": 0.0}),
    Effect("stragglers at scale", {"straggler_per_log2_gpu": 0.0}),
    Effect("once a step on the host", {"step_overhead_s": 0.0}),
)
"""The effects that the table of docs/accuracy.md drops in turn."""


def ablate(cases: Sequence[Case], classes: Sequence[str], table: ConstantTable) -> list[EffectRow]:
    """Mean |log error| of the whole model ("everything", first) and of the model without each effect."""
    whole = _errors(cases, table, _unchanged)
    names = sorted(set(classes))
    masks = [np.array([name == one for name in classes]) for one in names]
    base = [float(np.abs(whole[mask]).mean()) for mask in masks]

    def worth(name: str, errors: FloatArray) -> EffectRow:
        plain = [float(np.abs(errors[mask]).mean()) for mask in masks]
        centred = [float(np.abs(errors[mask] - np.median(errors[mask])).mean()) for mask in masks]
        growth = [new - old for new, old in zip(plain, base, strict=True)]
        return EffectRow(
            effect=name,
            error=round(float(np.mean(plain)), 4),
            recentred=round(float(np.mean(centred)), 4),
            most_affected=names[int(np.argmax(growth))],
        )

    rows = [worth("everything", whole)]
    for effect in EFFECTS:
        keys = {(name, key): value for name, value in effect.constants.items() for key in table.values[name]}
        rows.append(worth(effect.name, _errors(cases, table.with_values(keys), effect.adjust)))
    return rows


def _errors(cases: Sequence[Case], table: ConstantTable, adjust: Callable[[StageModel], StageModel]) -> FloatArray:
    predictions = predict(cases, table, adjust)
    measured = np.array([case.run.measured.step_time_s for case in cases], dtype=float)
    return np.asarray(np.log(np.array([p.step_time_s for p in predictions], dtype=float) / measured))
