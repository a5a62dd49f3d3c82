"""What the habits of measured stacks do to step time: attention kernels, launches, gradients, networks, layouts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from planner.accuracy.runs.interpret import interpret
from planner.backends.base import Backend
from planner.backends.stacks import STACKS
from planner.catalog import load_system
from planner.cost.collectives import group
from planner.cost.context import CostContext
from planner.specs.measurement import MeasuredRun
from planner.specs.model import ModelSpec, WindowSpec
from planner.units import GIB
from tests.strategies import machines, question, step_of

SMALL = ModelSpec(
    name="small", layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=32, head_dim=64, vocab=131072, max_seq=4096
)


def on_a100(backend: Backend | str = "megatron", model: ModelSpec = SMALL, gpus: int = 8, **job: Any) -> CostContext:
    return question(model, machines("a100-sxm-80gb", gpus), backend, **job)


def seconds(context: CostContext, name: str, **columns: Any) -> tuple[float, float]:
    """(forward, backward) of one term of the first layer kind."""
    term = step_of(context, **columns).layers[0].named(name)
    return float(term.forward[0]), float(term.backward[0])


def layer_s(context: CostContext, **columns: Any) -> float:
    return float(step_of(context, **columns).layer_time_s[0, 0])


def test_attention_kernels_in_the_order_of_their_speed() -> None:
    """Tuned, FlashAttention-2, its first version, materialised scores, and those with an operator for every step."""
    stack = STACKS["megatron"]
    times = [
        sum(seconds(on_a100(stack.with_habits(attention_kernel=kernel)), "core attention"))
        for kernel in ("vendor", "flash2", "flash1")
    ]
    times += [
        sum(seconds(on_a100(stack.with_habits(score_kernel=kernel), flash_attention=False), "core attention"))
        for kernel in ("fused", "operators")
    ]
    assert times == sorted(times)
    assert times[2] == pytest.approx(2.0 * times[1])


def test_heads_that_tensor_cores_cannot_load() -> None:
    """Materialised attention with a head size that is no multiple of 8 runs on the plain cores."""
    aligned, odd = (
        SMALL.model_copy(update={"heads": 64, "kv_heads": 64, "head_dim": width, "hidden": 64 * width})
        for width in (224, 225)
    )
    context = [on_a100("megatron", model, flash_attention=False) for model in (aligned, odd)]
    fast, slow = (sum(seconds(each, "core attention")) for each in context)
    assert slow > 4.0 * fast


def test_norm_of_many_operators() -> None:
    """Only the norm itself changes: 36 bytes an element instead of 4."""
    stack = STACKS["aleph-alpha"]
    plain, fused = (seconds(on_a100(stack.with_habits(norm_bytes=size)), "norms")[0] for size in (36.0, 4.0))
    context = on_a100(stack)
    moved = 32.0 * 2.0 * SMALL.hidden * 2048 / context.stream_bytes_per_s
    assert plain - fused == pytest.approx(moved)


def test_gradients_added_outside_the_multiplication() -> None:
    """12 bytes for every parameter of a layer, whatever the micro-batch, in the backward pass only."""
    context = on_a100(STACKS["nanotron"])
    forward, backward = seconds(context, "gradient accumulation")
    params = float(step_of(context).weights[0].dense[0])
    assert forward == 0.0
    assert backward == pytest.approx(12.0 * params / context.stream_bytes_per_s)
    assert seconds(context, "gradient accumulation", micro_batch=4)[1] == pytest.approx(backward)


def test_blocking_launches_lengthen_every_layer_and_are_repeated_by_recomputation() -> None:
    """The gaps come on top of the kernels; recomputation repeats those of the forward pass."""
    stack = STACKS["megatron-deepspeed"]
    blocking, free = (on_a100(stack.with_habits(blocking_launches=choice)) for choice in (True, False))
    gap = stack.habits.kernels_per_layer * blocking.constants.blocking_launch_s
    assert layer_s(blocking) - layer_s(free) == pytest.approx(gap)
    repeated = [float(step_of(each, recompute="full").recompute_time_s[0, 0]) for each in (blocking, free)]
    assert repeated[0] - repeated[1] == pytest.approx(gap / 3.0)


def test_head_is_split_even_where_the_loss_wants_all_logits() -> None:
    """Gathered logits cost traffic and a whole loss, not a whole multiplication."""
    stack = STACKS["aleph-alpha"]
    split = {term.name: term for term in step_of(on_a100(stack), tp=4).last_time.terms}
    whole = {term.name: term for term in step_of(on_a100(stack), tp=1).last_time.terms}
    assert float(split["output head"].forward[0]) < 0.3 * float(whole["output head"].forward[0])
    assert float(split["loss"].forward[0]) == pytest.approx(float(whole["loss"].forward[0]))
    assert float(split["logits traffic"].forward[0]) > 0.0


def test_hosts_are_held_up_by_collectives_between_stages_on_several_nodes() -> None:
    """nanotron's floor grows with TP where stages exchange over the network, and only there."""
    stack = STACKS["nanotron"]
    near, far = (question(SMALL, machines("h100-sxm-80gb", gpus), stack) for gpus in (8, 16))
    floors = [
        float(step_of(context, tp=tp, pp=pp, sequence_parallel=tp > 1).layers[0].host_floor[0])
        for context, tp, pp in ((near, 2, 2), (far, 8, 1), (far, 1, 2), (far, 2, 2), (far, 8, 2))
    ]
    assert floors[0] == floors[1] == floors[2]
    extra = far.constants.staged_collective_host_s
    assert floors[3] - floors[0] == pytest.approx(2.0 * extra)
    assert floors[4] - floors[0] == pytest.approx(8.0 * extra)


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "pp", "expected"),
    [
        (16, 2048, 8192, 2, (10, 6)),
        (16, 2048, 8192, 4, (5, 5, 5, 1)),
        (28, 3072, 8192, 8, (4, 4, 4, 4, 4, 4, 4, 0)),
        (32, 4096, 14336, 4, (9, 9, 8, 6)),
    ],
)
def test_nanotron_hands_out_blocks_by_cost(
    layers: int, hidden: int, ffn: int, pp: int, expected: tuple[int, ...]
) -> None:
    """The head counts as its weights do; a block that reaches its stage's share closes the stage."""
    width = hidden // 32
    model = SMALL.model_copy(update={"layers": layers, "hidden": hidden, "ffn": ffn, "head_dim": width})
    assert STACKS["nanotron"].default_layout(model, pp, 1) == expected


def test_bandwidth_of_a_network_that_was_swept_by_nodes() -> None:
    """Between two swept node counts the logarithm is interpolated; a member gets its share of the node."""
    system = load_system("aws-p5")
    spans = {span.nodes: span.bus_bytes_per_s for span in system.network_spans}
    cluster = machines("h100-sxm-80gb", 256, system="aws-p5")
    cluster = cluster.model_copy(update={"network_spans": system.network_spans, "ring_step_s": system.ring_step_s})
    context = question(SMALL, cluster)
    whole = group(context, np.array([64, 8]), np.array([1, 8]))
    assert whole.bus_bytes_per_s[0] == pytest.approx(spans[8])
    assert whole.bus_bytes_per_s[1] == pytest.approx(spans[8] / 8)
    assert whole.latency_s[0] == pytest.approx(63 * 3.5e-5)
    twelve = group(context, np.array([96]), np.array([1])).bus_bytes_per_s[0]
    share = math.log2(12 / 8)
    assert twelve == pytest.approx(spans[8] ** (1 - share) * spans[16] ** share)


def measured(framework: str, **run: Any) -> MeasuredRun:
    fields = {"framework": framework, "precision": "bf16", "tp": 1, "pp": 2, "micro_batch": 1, "global_batch": 64}
    return MeasuredRun.model_validate(
        {
            "id": "test/row",
            "model": {
                "layers": 30, "hidden": 4096, "ffn": 16384, "heads": 32, "kv_heads": 32, "head_dim": 128,
                "vocab": 50304, "seq_len": 1024, "gated_mlp": False,
            },
            "hardware": {"gpu": "a100-80gb-sxm", "gpus": 8, "gpus_per_node": 8},
            "run": {**fields, **run},
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "flash", "habit", "value"),
    [
        ("torch", False, "score_kernel", "operators"),
        ("fused", False, "score_kernel", "fused"),
        ("flash_attentionv1.0.8", True, "attention_kernel", "flash1"),
        ("flash_attention2", True, "norm_bytes", 36.0),
        ("flash_attention2 + RMS kernel", True, "norm_bytes", 4.0),
    ],
)
def test_kernels_of_the_layout_study(kernel: str, flash: bool, habit: str, value: object) -> None:
    """The sheet's kernel name decides attention and norm."""
    case = interpret(measured("aleph-alpha", flash_attention=flash, recompute="none", extra={"kernel": kernel}))
    assert getattr(case.context.backend.habits, habit) == value
    assert case.context.job.flash_attention is flash


def test_zero_bubble_fork_materialises_scores_and_recomputes_nothing() -> None:
    """Neither is stated by its tables: the framework of 2023 had no flash attention by default."""
    case = interpret(measured("megatron-lm (sail-sg zero-bubble fork)", vpp=1, extra={"pp_schedule": "ZB-2p"}))
    assert not case.context.job.flash_attention
    assert len(case.batch) == 1
    assert case.context.recompute_kinds[0].mode == "none"


def test_megatron_that_is_said_to_shard_gradients() -> None:
    """Stage 2 of a framework that knows stages 0 and 1 is a reduction into shards once a step."""
    case = interpret(measured("megatron-lm", zero=2, recompute="none", vpp=1))
    assert case.batch.zero_stage.tolist() == [1]
    assert case.context.cluster.memory_bytes_per_gpu > 70 * GIB


def test_materialised_scores_of_every_pair() -> None:
    """Without a fused kernel neither a window nor packed samples spare a score."""
    windowed = SMALL.model_copy(update={"window": WindowSpec(size=256, global_every=0)})
    plain, packed = (on_a100(flash_attention=False, sample_tokens=sample) for sample in (None, 128))
    times = [seconds(context, "core attention") for context in (plain, packed)]
    times.append(seconds(on_a100(model=windowed, flash_attention=False), "core attention"))
    assert times[0] == times[1] == times[2]


def test_a_loss_of_several_kernels_streams_its_logits_more_often() -> None:
    loss = {
        choice: next(term for term in step_of(on_a100(loss=choice)).last_time.terms if term.name == "loss")
        for choice in ("auto", "fused", "eager")
    }
    assert loss["auto"].forward[0] == loss["fused"].forward[0]
    assert loss["eager"].forward[0] == pytest.approx(20.0 / 8.0 * loss["fused"].forward[0])
