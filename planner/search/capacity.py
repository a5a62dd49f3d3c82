"""How many layers the memory of each pipeline rank takes, for a number of recomputed layers and an offloaded share.

A relaxation where layers differ: one kind of layer alone, and all layers with the smallest coefficients of any kind.
"""

from __future__ import annotations

import numpy as np

from planner.search.inner import Inner
from planner.specs.batch import BoolArray, FloatArray, IntArray

_ROUNDING = 1e-9


def _room(inner: Inner, share: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(N, P) bytes left for layers in the forward/backward phase and in the optimizer step."""
    model, ranks = inner.model, inner.group.pp
    ends = np.zeros((len(inner), ranks))
    ends[:, 0] += model.first_state_bytes - share * model.first_offloadable_bytes
    ends[:, -1] += model.last_state_bytes - share * model.last_offloadable_bytes
    step = inner.budget_bytes[:, None] - ends
    forward = step - model.fixed_bytes[:, None]
    forward[:, 0] -= model.in_flight[:, 0] * model.first_activation_bytes
    forward[:, -1] -= model.last_fixed_bytes
    return forward, step


def rank_caps(inner: Inner, kind: int | None, recomputed: IntArray, share: FloatArray) -> IntArray:
    """(N, P) most layers of one kind (None: of the cheapest) on each rank; negative where not even none fits.

    ``recomputed`` (N,) layers of each virtual stage recompute, at most; ``share`` (N,) of the optimizer is offloaded.
    """
    model = inner.model
    chosen = slice(None) if kind is None else slice(kind, kind + 1)
    state = model.layer_state_bytes[:, chosen] - share[:, None] * model.layer_offloadable_bytes[:, chosen]
    kept = model.layer_activation_bytes[:, chosen]
    spared = model.recompute_saved_bytes[:, chosen]
    flight = model.in_flight[:, :, None]
    plain = (state[:, None, :] + flight * kept[:, None, :]).min(axis=2)
    again = (state[:, None, :] + flight * (kept - spared)[:, None, :]).min(axis=2)
    forward, step = _room(inner, share)
    most = (inner.group.vpp * recomputed)[:, None].astype(float)
    tiny = 1.0  # byte: a layer that takes less is no constraint
    plain, again = np.maximum(plain, tiny), np.maximum(again, tiny)
    spare = forward - again * most
    layers = np.where(spare >= 0, most + spare / plain, forward / again)
    temporary = (state + model.step_temporary_layer_bytes[:, chosen]).min(axis=1)
    layers = np.minimum(layers, step / np.maximum(temporary, tiny)[:, None])
    whole = np.floor(np.clip(layers, -1.0, 1e9) * (1 + 1e-12) + _ROUNDING).astype(np.int64)
    return np.asarray(np.minimum(whole, inner.group.vpp * inner.max_recomputed))


def sufficient(inner: Inner, recomputed: IntArray, share: FloatArray) -> BoolArray:
    """Whether all ranks together could hold the model; false proves that no layout fits."""
    least, layers = inner.group.least_of_rank, inner.layers
    caps = rank_caps(inner, None, recomputed, share)
    enough = (caps >= least).all(axis=1) & (np.minimum(caps, layers).sum(axis=1) >= layers)
    if len(inner.totals) > 1:
        for kind, total in enumerate(inner.totals):
            single = np.clip(rank_caps(inner, kind, recomputed, share), 0, layers)
            enough &= single.sum(axis=1) >= total
    return np.asarray(enough)


def host_steps(inner: Inner) -> IntArray:
    """(N,) most offload steps that the host memory may allow; -1 where even an empty share does not fit."""
    model, ranks = inner.model, inner.group.pp
    whole = (model.layer_host_bytes * inner.totals).sum(axis=1)
    fullest = (whole + model.first_host_bytes + model.last_host_bytes) / ranks
    fullest = np.maximum(fullest, -(-inner.layers // ranks) * model.layer_host_bytes.min(axis=1))
    room = inner.limits.host_bytes / model.local_ranks - model.fixed_host_bytes
    possible = np.floor(inner.group.steps * room / np.maximum(fullest, 1.0) + _ROUNDING)
    most = np.minimum(possible, inner.group.steps).astype(np.int64)
    return np.where(room < 0, -1, most)
