"""Bytes that one GPU sends in a step, against counts by hand and against the seconds that the same exchanges take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.backends import BACKENDS
from planner.cost.collectives import SECONDS, SENT_BYTES
from planner.cost.context import CostContext, Work
from planner.cost.groups import Groups
from planner.cost.layers import expert_exchanges
from planner.cost.volumes import Volume, volumes
from planner.service.profiles import context_of
from planner.specs.convert import from_strategy
from planner.specs.model import ModelSpec, MoeSpec
from tests.random_plans import random_plans
from tests.strategies import machines, question, strategy

HIDDEN, FFN, LAYERS, HEADS, VOCAB = 1024, 4096, 12, 16, 32768
PARAMETERS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN) + 2 * VOCAB * HIDDEN + HIDDEN
TOKENS = 2048
MODEL = ModelSpec(
    name="small",
    layers=LAYERS,
    hidden=HIDDEN,
    ffn=FFN,
    heads=HEADS,
    kv_heads=HEADS,
    head_dim=HIDDEN // HEADS,
    vocab=VOCAB,
    max_seq=TOKENS,
)
HALF = 2
"""Bytes of a bf16 activation or parameter."""
GRADIENT = 4
"""Bytes of a reduced gradient."""


def sent(context: CostContext, **columns: Any) -> dict[str, float]:
    return {volume.axis: volume.sent_bytes for volume in volumes(context, strategy(context, **columns))}


def small(gpus: int, backend: str = "megatron", **job: Any) -> CostContext:
    return question(MODEL, machines(gpus=gpus), backend, **{"seq_len": TOKENS, "global_batch": 32, **job})


def test_tensor_parallel_bytes_by_hand() -> None:
    """Four all-gathers and four reduce-scatters of 2 s b h bytes a layer and micro-batch (arXiv 2205.05198), and one
    all-gather each way at the embedding and at the head."""
    t, pp, m = 4, 3, 8
    full = HALF * TOKENS * HIDDEN
    found = sent(small(48), tp=t, pp=pp, dp=4, sequence_parallel=True)
    assert found["tp"] == pytest.approx(m * (8 * LAYERS / pp + 2) * (t - 1) / t * full)


def test_all_reduces_send_what_gather_and_scatter_send() -> None:
    """Without sequence parallelism two all-reduces each way move the same bytes."""
    context = small(8)
    assert sent(context, tp=8)["tp"] == pytest.approx(sent(context, tp=8, sequence_parallel=True)["tp"])


def test_full_recomputation_repeats_the_forward_exchanges() -> None:
    """Megatron's full recomputation runs the collectives of the forward pass again: half as many more inside layers."""
    context = small(8)
    plain = sent(context, tp=8, sequence_parallel=True)["tp"]
    again = sent(context, tp=8, sequence_parallel=True, recompute="full")["tp"]
    ends = 32 * 4 * 7 / 8 * HALF * TOKENS * HIDDEN
    assert again - ends == pytest.approx(1.5 * (plain - ends))


@pytest.mark.parametrize("stage", [0, 1])
def test_data_parallel_bytes_by_hand(stage: int) -> None:
    """An all-reduce sends 2 N (d - 1) / d gradients; a sharded optimizer as many gradients once and parameters once."""
    share = 7 / 8 * PARAMETERS
    expected = share * (2 * GRADIENT if stage == 0 else GRADIENT + HALF)
    assert sent(small(8), zero_stage=stage) == {"dp": pytest.approx(expected)}


def test_fully_sharded_bytes_by_hand() -> None:
    """Every micro-batch gathers all parameters twice and scatters all gradients."""
    m = 4
    found = sent(small(8, "fsdp"), zero_stage=3)
    assert found == {"dp": pytest.approx(m * 7 / 8 * PARAMETERS * (2 * HALF + GRADIENT))}


@pytest.mark.parametrize(("pp", "vpp", "passes"), [(2, 1, 1), (3, 1, 2), (4, 3, 6), (2, 3, 5)])
def test_pipeline_bytes_by_hand(pp: int, vpp: int, passes: int) -> None:
    """2 s b h bytes a micro-batch, chunk and direction; the ends of the model have one direction less."""
    found = sent(small(8 * pp), pp=pp, vpp=vpp, dp=8, micro_batch=2, global_batch=64)
    assert found["pp"] == pytest.approx(passes * 2 * HALF * 2 * TOKENS * HIDDEN)


def test_sequence_parallel_ranks_share_what_goes_to_the_next_stage() -> None:
    """Each of the tp ranks sends its own part of the hidden vectors."""
    context = small(32)
    whole = sent(context, tp=8, pp=4)["pp"]
    assert sent(context, tp=8, pp=4, sequence_parallel=True)["pp"] == pytest.approx(whole / 8)


@pytest.mark.parametrize(
    ("backend", "parts"),
    [
        # Keys and values of all tokens once forward; their gradients come back beside them.
        ("megatron", 2 * 3),
        ("torchtitan", 2 * 3),
        # Queries, keys, values and output, of the rank's own tokens, each way.
        ("deepspeed", 4 * 2 / 8),
    ],
)
def test_context_parallel_bytes_by_hand(backend: str, parts: float) -> None:
    """Bytes of a layer and micro-batch, of (c - 1) / c of tensors of 2 s h bytes."""
    context, m = small(8, backend), 32
    assert sent(context, cp=8)["cp"] == pytest.approx(m * LAYERS * parts * 7 / 8 * HALF * TOKENS * HIDDEN)


def test_expert_parallel_bytes_by_hand() -> None:
    """Dispatch and combine send top_k copies of (e - 1) / e of the tokens, forward and backward, in every layer."""
    moe = MoeSpec(experts=8, top_k=2, expert_ffn=FFN)
    context = question(MODEL.model_copy(update={"moe": moe}), machines(gpus=8), seq_len=TOKENS, global_batch=32)
    found = sent(context, ep=8)
    assert found["ep"] == pytest.approx(4 * LAYERS * 4 * 7 / 8 * moe.top_k * HALF * TOKENS * HIDDEN)


def test_copies_of_a_token_by_hand() -> None:
    """A dispatcher that knows the domains sends one copy of a token to each of four it meets, and inside one to each
    rank: of n places 8 experts meet n (1 - (1 - 1/n)^8)."""
    moe = MoeSpec(experts=32, top_k=8, expert_ffn=FFN)
    model = MODEL.model_copy(update={"moe": moe})
    context = question(model, machines(gpus=32), seq_len=TOKENS, global_batch=32)
    work = Work(context, strategy(context, ep=32))
    groups = Groups(work)
    assert groups.expert.crosses[0] == 1.0
    outside = 3 / 4 * 4 * (1 - (3 / 4) ** 8)
    inside = 31 / 32 * 32 * (1 - (31 / 32) ** 8)
    each = expert_exchanges(work, groups, context.kinds[0], SENT_BYTES)
    assert each[0] == pytest.approx(2 * (outside + inside) * HALF * TOKENS * HIDDEN)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_degree_has_its_traffic(backend: str) -> None:
    """In random plans a kind of group sends something where, and only where, it has several ranks."""
    for document in random_plans(backend, 25, seed=3):
        s = document.best.strategy
        context = context_of(document.request, backend)
        found = {volume.axis: volume for volume in volumes(context, from_strategy(s, context.recompute_kinds))}
        assert all(volume.sent_bytes > 0 and np.isfinite(volume.sent_bytes) for volume in found.values())
        several = {"tp": max(s.tp, s.etp), "ep": s.ep, "pp": s.pp}
        assert {axis for axis in several if axis in found} == {axis for axis, degree in several.items() if degree > 1}
        assert ("cp" in found) <= (s.cp > 1)
        assert ("dp" in found) <= (s.gpus > s.pp)
        _check_time(context, found)


def _check_time(context: CostContext, found: dict[str, Volume]) -> None:
    """Seconds and bytes of an exchange agree: no group sends faster than its links."""
    for volume in found.values():
        for group in volume.groups:
            size = np.array([1e9])
            for measured in ("all_gather", "all_reduce", "all_to_all", "send"):
                seconds = getattr(SECONDS, measured)(group, size)
                bytes_sent = getattr(SENT_BYTES, measured)(group, size)
                assert (seconds[0] > 0.0) == (bytes_sent[0] > 0.0) == (group.size[0] > 1)
                fastest = max(context.cluster.accelerator.fabric.bytes_per_s, context.cluster.nic_bytes_per_s)
                # A switch that reduces for the ranks saves them half of what they would send.
                assert bytes_sent[0] <= 2.5 * fastest * seconds[0]


def test_one_strategy_at_a_time() -> None:
    context = small(8)
    one = strategy(context)
    with pytest.raises(ValueError, match="one strategy, got 2"):
        volumes(context, one.take([0, 0]))
