"""Time of mixture-of-experts and hybrid layers: grouped GEMMs, dispatch, launches and graphs, scans, prediction
blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.catalog import load_model
from planner.cost.collectives import group
from planner.cost.context import CostContext, Work
from planner.cost.gemm import grouped_linear_s
from planner.cost.layers import LayerTime, recompute_s
from planner.cost.params import LayerKind
from planner.cost.step import Step
from planner.cost.traffic import cast_bytes
from tests.strategies import machines, question, strategy

MOE: LayerKind = ("attention", "moe")


def with_habits(context: CostContext, **habits: Any) -> CostContext:
    return replace(context, backend=context.backend.with_habits(**habits))


def step(context: CostContext, **columns: Any) -> Step:
    plan = strategy(context, **columns)
    return Step(Work(context, plan), int(plan.pp[0]))


def layer(context: CostContext, kind: LayerKind = MOE, **columns: Any) -> LayerTime:
    return step(context, **columns).layers[context.kinds.index(kind)]


def qwen(gpus: int = 64, accelerator: str = "h100", **job: Any) -> CostContext:
    return question("qwen3-235b-a22b", machines(accelerator, gpus), global_batch=gpus, **job)


@pytest.mark.parametrize(
    ("tokens", "forward_share", "weight_share"),
    [(128, 0.19, 0.08), (512, 0.40, 0.22), (1024, 0.42, 0.28)],
)
def test_grouped_gemms_at_few_tokens(tokens: int, forward_share: float, weight_share: float) -> None:
    """SimuMax's B200 tables, against 0.48 and 0.41 of peak at 2,460 tokens: weight gradients, whose reduction length is
    the tokens, lose more at few of them."""
    forward, weight = _grouped_rates(tokens)
    most_forward, most_weight = _grouped_rates(2460)
    assert forward / most_forward == pytest.approx(forward_share / 0.48, rel=0.15)
    assert weight / most_weight == pytest.approx(weight_share / 0.41, rel=0.4)


def _grouped_rates(tokens: int) -> tuple[float, float]:
    """FLOP/s of the forward pass and of the weight gradients of eight experts."""
    context = question("deepseek-v3", machines("b200", 8))
    local, inputs, outputs = 8.0, 7168.0, 4096.0
    rows = np.array([tokens * local])
    forward, backward = grouped_linear_s(
        context.constants,
        context.layer_flops_per_s,
        context.stream_bytes_per_s,
        rows,
        np.array([local]),
        inputs,
        outputs,
    )
    flops = 2.0 * rows[0] * inputs * outputs
    return flops / forward[0], flops / (backward[0] - forward[0])


def test_a_rank_receives_a_token_once() -> None:
    """Eight ranks of one node hold the eight experts of a token 8 (1 - (7/8)^8) = 5.25 times on average, not eight."""
    context = question("deepseek-v3", machines("h100", 8))
    experts = group(context, np.array([8]), np.array([1]))
    token = np.array([4096 * 7168 * 2.0])
    streamed = experts.dispatch_s(token, 8) - experts.latency_s
    everything = experts.fraction * 8 * token / experts.inside_exchange_bytes_per_s
    assert streamed[0] / everything[0] == pytest.approx(1.0 - (7.0 / 8.0) ** 8)


def test_flex_dispatch_only_where_the_habit_says() -> None:
    """Inside a domain the planner writes the all-to-all; a run with HybridEP sends one copy to each rank."""
    context = qwen(8)
    times = {
        habit: layer(with_habits(context, expert_dispatch=habit), ep=8).named("expert-parallel traffic").forward[0]
        for habit in ("all-to-all", "flex-between-domains", "flex")
    }
    assert times["flex"] < times["all-to-all"] == times["flex-between-domains"]


def test_overlap_hides_its_share_of_expert_traffic() -> None:
    context = qwen()
    shown = [
        layer(with_habits(context, expert_overlap=overlap), ep=64).named("expert-parallel traffic").forward[0]
        for overlap in (False, True)
    ]
    assert shown[1] / shown[0] == pytest.approx(1.0 - context.constants.expert_overlap_share)


def test_graphs_take_launches_from_the_host() -> None:
    """No graphs, partial graphs, whole iteration: the host floor falls to nothing."""
    context = qwen()
    floors = [
        layer(with_habits(context, cuda_graphs=scope), ep=64).host_floor[0] for scope in ("none", "partial", "full")
    ]
    assert floors[0] > floors[1] > floors[2] == 0.0


def test_what_makes_the_host_slower() -> None:
    """Narrow formats and tensor parallelism add launches, fixed tokens per expert spare them, Grace cores are slow."""
    floor = layer(qwen(), ep=8).host_floor[0]
    assert layer(qwen(precision="fp8"), ep=8).host_floor[0] > 1.3 * floor
    assert layer(qwen(), ep=8, tp=2).host_floor[0] > 1.3 * floor
    assert layer(with_habits(qwen(), padded_experts=True), ep=8).host_floor[0] < 0.5 * floor
    assert layer(qwen(accelerator="gb200"), ep=8).host_floor[0] > 1.5 * floor


def test_launches_of_mixers() -> None:
    """Latent attention launches more than plain attention; partial graphs take those launches and the exchanges of
    tensor parallelism around the mixer, not those around shared experts."""
    deepseek = question("deepseek-v3", machines("h100", 64), global_batch=64)
    constants = deepseek.constants
    dense = layer(deepseek, ("mla", "dense"), ep=8).host_floor[0]
    assert dense > constants.mixer_host_share * constants.moe_host_s
    assert layer(deepseek, ("mla", "moe"), ep=8).host_floor[0] > layer(qwen(), ep=8).host_floor[0]
    added = {}
    for name, context, kind in (("qwen", qwen(), MOE), ("deepseek", deepseek, ("mla", "moe"))):
        graphs = with_habits(context, cuda_graphs="partial")
        floors = [layer(graphs, kind, ep=8, tp=tp).host_floor[0] for tp in (1, 2)]
        added[name] = floors[1] - floors[0]
    assert added["qwen"] == pytest.approx(0.0)
    assert added["deepseek"] > 0.0


def test_overlapped_expert_traffic_is_issued_in_pieces() -> None:
    """It adds launches, but none where tensor parallelism breaks the layer already, and none under graphs."""

    def added(tp: int = 1, graphs: str = "none") -> float:
        context = with_habits(qwen(), cuda_graphs=graphs)
        plain, overlapped = (
            layer(with_habits(context, expert_overlap=on), ep=8, tp=tp).host_floor[0] for on in (False, True)
        )
        return float(overlapped - plain)

    constants = qwen().constants
    assert added() == pytest.approx(constants.expert_overlap_host_factor * constants.moe_host_s)
    assert added(tp=2) < 0.5 * added()
    assert added(graphs="partial") == pytest.approx(0.0)


def test_a_plain_all_to_all_waits_for_counts() -> None:
    """DeepEP, a fixed number of tokens or another micro-batch beside it leave no wait."""
    waiting = with_habits(qwen(), expert_dispatch="all-to-all")
    wait = layer(waiting, ep=8).named("routing waits")
    share = waiting.constants.routing_wait_share * waiting.constants.moe_host_s
    assert wait.forward[0] + wait.backward[0] == pytest.approx(share)
    for habits in ({"expert_dispatch": "flex"}, {"padded_experts": True}, {"expert_overlap": True}):
        assert "routing waits" not in {term.name for term in layer(with_habits(waiting, **habits), ep=8).terms}


def test_small_exchanges_are_slowed_by_their_pieces() -> None:
    """Ranks that send as much to every peer reach the same share of the network, however many peers there are."""
    context = question("deepseek-v3", machines("h100", 512))

    def share(ranks: int) -> float:
        peers = group(context, np.array([ranks]), np.array([1]))
        sent = np.array([4e6 * ranks])
        outside = (peers.domains - 1.0) / peers.domains * sent / peers.outside_bytes_per_s
        return float(outside[0] / peers.all_to_all_s(sent)[0])

    assert share(16) == pytest.approx(share(64), rel=0.02)
    assert 0.6 < share(16) < 0.9


def test_recomputed_experts_are_issued_again() -> None:
    """A launch-bound layer that recomputes its experts takes a third of its launches more."""
    context = qwen(8, precision="fp8", seq_len=128)
    bound = step(context, ep=8, recompute="moe")
    assert bound.recompute_time_s[0, 0] == pytest.approx(bound.layers[0].host_floor[0] / 3.0)


def test_natural_routing_waits_for_the_busiest_rank() -> None:
    context = qwen()
    forced, natural = (layer(with_habits(context, balanced_routing=even), ep=64) for even in (True, False))
    peak = context.constants.natural_routing_peak
    assert natural.named("expert-parallel traffic").forward[0] == pytest.approx(
        peak * forced.named("expert-parallel traffic").forward[0], rel=0.02
    )
    assert natural.named("expert matrices").forward[0] > forced.named("expert matrices").forward[0]


def test_fused_expert_mlp_spares_passes() -> None:
    """Activation and quantisation inside the grouped GEMM leave only their dense share (here none) outside."""
    context = qwen(precision="fp8")
    plain, fused = (layer(with_habits(context, fused_expert_mlp=on), ep=64) for on in (False, True))
    assert "activation function" not in {term.name for term in fused.terms}
    assert fused.named("fp8 casts").forward[0] < plain.named("fp8 casts").forward[0]


def test_biased_experts_move_more() -> None:
    """gpt-oss adds biases outside its grouped GEMMs."""
    context = question("gpt-oss-120b", machines("h100", 64), global_batch=64)
    bare = replace(context, model=context.model.model_copy(update={"bias": type(context.model.bias)()}))
    kind: LayerKind = ("window", "moe")
    times = [layer(case, kind, ep=8).named("expert permutation").forward[0] for case in (context, bare)]
    assert times[0] > 2.0 * times[1]


def test_scan_mixers_stream_their_chunk_states() -> None:
    """Mamba-2 layers of Nemotron 3 Nano: states of N a channel and chunk travel in fp32 beside the channels."""
    context = question("nemotron-3-nano-30b-a3b", machines("h100", 8), global_batch=8)
    scan = layer(context, ("mamba", "none"))
    assert scan.named("mixer elementwise").forward[0] > 2.0 * scan.named("norms").forward[0]
    assert scan.named("core attention").forward[0] > 0.0


def test_prediction_block_of_a_hybrid() -> None:
    """Nemotron 3 repeats attention and experts ("*E"); a plain decoder repeats its last layer."""
    assert load_model("nemotron-3-super-120b-a12b").spec.prediction_kinds() == (("attention", "none"), ("none", "moe"))
    assert load_model("deepseek-v3").spec.prediction_kinds() == (("mla", "moe"),)


def test_recomputed_modules_of_mixtures_spare_dense_layers() -> None:
    """Megatron's ``moe`` checkpoints the whole block, shared experts included, and ``moe_act`` the activation of the
    experts; the dense layers in front of them save and repeat what they did."""
    context = question("deepseek-v3", machines("h100", 64), seq_len=4096, global_batch=64)
    dense, mixture = context.kinds.index(("mla", "dense")), context.kinds.index(("mla", "moe"))
    whole, act = (step(context, ep=64, recompute=kind) for kind in ("moe", "moe_act"))
    for recomputed in (whole, act):
        assert recomputed.recompute_saved_bytes[0, dense] == 0.0
        assert recomputed.recompute_time_s[0, dense] == 0.0
    tokens, inner = 4096.0, 2048.0
    # Gate and up projections, activations, expert inputs of eight copies; router logits in fp32.
    routed = 8 * tokens * (6 * inner + 2 * 7168) + 8.0 * 256 * tokens
    assert whole.recompute_saved_bytes[0, mixture] == pytest.approx(routed + tokens * 6 * inner)
    assert act.recompute_saved_bytes[0, mixture] == pytest.approx(8 * tokens * 2 * inner)


def test_recomputed_mixture_repeats_its_shared_experts() -> None:
    """Router, shared and routed experts, permutation and traffic run again."""
    context = question("deepseek-v3", machines("h100", 64), seq_len=4096, global_batch=64)
    found = layer(context, ("mla", "moe"), ep=64, micro_batch=1)
    choice = next(kind for kind in context.recompute_kinds if kind.id == "moe")
    work = step(context, ep=64).work
    names = ("router", "mlp matrices", "expert matrices", "activation function", "expert permutation")
    forward = sum(found.named(name).forward[0] for name in (*names, "expert-parallel traffic"))
    assert recompute_s(work, ("mla", "moe"), found, choice)[0] == pytest.approx(forward)


def test_latent_attention_quantises_its_latents_and_values() -> None:
    """Inputs of the five projections: hidden states, both latents, the heads' values (128 wide, not the keys' 192)."""
    context = question("deepseek-v3", machines("h100", 64), seq_len=4096, global_batch=64, precision="fp8")
    work = step(context, ep=64).work
    dense = cast_bytes(work, ("mla", "dense"))[0] - cast_bytes(work, ("none", "dense"))[0]
    assert dense == pytest.approx(9.0 * 4096 * (7168 + 1536 + 512 + 128 * 128))


def test_a_key_and_a_value_travel_in_context_parallelism() -> None:
    """Keys of latent attention are 192 wide, values 128."""
    context = question("deepseek-v3", machines("h100", 64), "deepspeed", seq_len=8192, global_batch=8)
    found = step(context, cp=8)
    term = found.layers[0].named("context-parallel traffic")
    sent = 1024 * 2.0 * 128 * (2 * 192 + 2 * 128)
    assert term.forward[0] == pytest.approx(found.groups.context.all_to_all_s(np.array([sent]))[0])


def test_plans_wait_for_counts_where_no_flexible_dispatcher_is_written() -> None:
    """DeepEP is written on NVLink GPUs where experts span domains; elsewhere the plain exchange makes the host wait."""

    def parts(accelerator: str, ep: int) -> LayerTime:
        return layer(qwen(accelerator=accelerator), ep=ep)

    def waits(accelerator: str, ep: int) -> bool:
        return any(term.name == "routing waits" for term in parts(accelerator, ep).terms)

    assert [waits("h100", ep) for ep in (1, 8, 16)] == [True, True, False]
    assert waits("gb200", 64)
    for accelerator in ("mi300x", "h100-pcie-80gb"):
        assert waits(accelerator, 16)
        plain = layer(with_habits(qwen(accelerator=accelerator), expert_dispatch="all-to-all"), ep=16)
        assert np.array_equal(plain.total(), parts(accelerator, 16).total())
