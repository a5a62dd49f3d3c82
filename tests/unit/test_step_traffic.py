"""What hides behind what: gradient traffic by schedule and framework, offloaded weights, experts, prediction blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.backends import get_backend
from planner.cost.collectives import group
from planner.cost.context import CostContext, Work
from planner.cost.step import Step
from planner.specs.batch import DEVICES
from tests.strategies import machines, question, strategy

CPU = DEVICES.index("cpu")


def step(context: CostContext, **columns: Any) -> Step:
    plan = strategy(context, **columns)
    return Step(Work(context, plan), int(plan.pp[0]))


def test_chunks_widen_the_window() -> None:
    """The last p micro-batches end chunk by chunk: (p (v - 1) + 1) / v micro-batches to hide behind."""
    context = question("llama-3-70b", machines("h100", 64), global_batch=64)
    shares = {v: step(context, tp=4, pp=4, vpp=v, zero_stage=1).model.reduce_window_share[0] for v in (1, 2, 5)}
    assert shares[2] / shares[1] == pytest.approx((4 * 1 + 1) / 2)
    assert shares[5] / shares[1] == pytest.approx((4 * 4 + 1) / 5)


def test_few_micro_batches_leave_a_small_window() -> None:
    """With fewer micro-batches than stages only those that exist are waited for."""
    context = question("llama-3-70b", machines("h100", 64), global_batch=8)
    plan = step(context, tp=4, pp=4, vpp=2, zero_stage=1)
    assert plan.model.slowest_weight[0] == 2
    assert plan.model.reduce_window_share[0] == pytest.approx(0.9 * 3 / 2)


@pytest.mark.parametrize(("stage", "hidden"), [(2, False), (3, True)])
def test_deepspeed_overlaps_stage_3_only(stage: int, hidden: bool) -> None:
    """overlap_comm is on at stage 3; at stage 2 the reduction adds to the backward pass, once-a-step traffic to the
    tail."""
    plan = step(question("llama-2-7b", machines("h100", 64), "deepspeed", global_batch=64), zero_stage=stage)
    layer, moved = plan.layers[0], plan.layer_traffic[0]
    alone = layer.forward() + layer.backward()
    sum_s = float((alone + moved.forward + moved.backward)[0])
    assert bool(plan.layer_time_s[0, 0] < 0.999 * sum_s) is hidden
    assert plan.model.reduce_window_share[0] == 0.0


def test_fsdp_stage_2_gathers_in_every_forward_pass() -> None:
    """reshard_after_forward=False saves the second gather only."""
    context = question("llama-2-7b", machines("h100", 8), "fsdp", global_batch=64)
    kept, freed = (step(context, zero_stage=stage).layer_traffic[0] for stage in (2, 3))
    assert kept.once[0] == 0.0
    assert kept.forward[0] == freed.forward[0] > 0.0
    assert kept.backward[0] == pytest.approx(freed.backward[0] - freed.forward[0])


def test_offloaded_weights_cross_the_host_link() -> None:
    """A gather is no faster than its shards come up the host link, twice per layer and micro-batch."""
    context = question("llama-2-7b", machines("h100", 2), "deepspeed")
    off: dict[str, Any] = {"offload_optimizer": 1.0, "offload_device": CPU}
    near, far = (step(context, zero_stage=3, offload_parameters=p, **off) for p in (0, CPU))
    link = context.cluster.accelerator.host_link.measured_bytes_per_s
    assert link is not None
    shard = 2.0 * float(far.weights[0].dense[0]) / 2
    assert far.layer_traffic[0].forward[0] == pytest.approx(max(shard / link, near.layer_traffic[0].forward[0]))
    assert far.layer_traffic[0].forward[0] > near.layer_traffic[0].forward[0]


def test_hybrid_sharding_keeps_experts_near() -> None:
    """Without expert parallelism experts are sharded like dense weights: inside the node when those are."""
    context = question("mixtral-8x7b", machines("h100", 64), "fsdp", global_batch=64)
    whole, near = (step(context, zero_stage=3, shard_degree=degree) for degree in (64, 8))
    assert near.groups.expert_shard.crosses[0] == 0.0
    assert near.groups.expert_replica.size[0] == 8.0
    assert near.layer_traffic[0].forward[0] < whole.layer_traffic[0].forward[0]


def test_prediction_blocks_save_activations() -> None:
    """A multi-token-prediction block holds one more layer and a second loss on the last stage."""
    context = question("deepseek-v3", machines("h100", 128), global_batch=128)
    columns: dict[str, Any] = {"pp": 8, "ep": 16, "zero_stage": 1}
    bare = question(context.model.model_copy(update={"mtp_layers": 0}), context.cluster, global_batch=128)
    with_block, without = step(context, **columns), step(bare, **columns)
    assert context.model.mtp_layers == 1
    kind = context.kinds.index(context.model.layer_kinds()[-1])
    assert with_block.prediction_bytes[0] > with_block.activation_bytes[0, kind]
    assert without.prediction_bytes[0] == 0.0
    assert with_block.loss_transient[0] == pytest.approx(2.0 * without.loss_transient[0])


def test_only_queries_and_keys_are_normed() -> None:
    """Query/key norms save 2 (h_q + h_kv) bytes a token more; values have no norm."""
    model = question("llama-3-8b").model
    context = question(model.model_copy(update={"qk_norm": "per_head"}))
    plain, normed = step(question(model)), step(context)
    extra = normed.tensors[0]["qkv"][0] - plain.tensors[0]["qkv"][0]
    width = (model.heads + model.kv_heads) * model.head_dim
    assert extra == pytest.approx(2.0 * width * normed.work.tokens[0])


def test_cross_node_dispatch_runs_near_line_rate() -> None:
    """4096 tokens of 7168 to 8 experts over four nodes: DeepEP publishes 43 to 47 of 50 GB/s between nodes."""
    context = question("deepseek-v3", machines("h100", 32))
    experts = group(context, np.array([32]), np.array([1]))
    token = 4096 * 7168 * 2.0
    outside = 0.75 * 4.0 * (1.0 - 0.75**8) * token
    assert 40e9 <= outside / float(experts.dispatch_s(np.array([token]), 8)[0]) <= 48e9


def test_interleaved_groups_share_pcie_bridges() -> None:
    """On PCIe a group of every second GPU gets half the bandwidth of neighbours; NVLink switches do not care."""
    for name, factor in (("a100-pcie-80gb", 2.0), ("h100", 1.0)):
        context = question(cluster=machines(name, 8))
        near, spread = (group(context, np.array([4]), np.array([stride])) for stride in (1, 2))
        assert near.bus_bytes_per_s[0] / spread.bus_bytes_per_s[0] == pytest.approx(factor)


def test_neighbours_exchange_faster_on_pcie() -> None:
    """Four GPUs send less across the bridges than eight do."""
    context = question(cluster=machines("a100-pcie-80gb", 8))
    four, eight = (group(context, np.array([size]), np.array([1])) for size in (4, 8))
    assert four.inside_exchange_bytes_per_s[0] > 2.0 * eight.inside_exchange_bytes_per_s[0]


def test_switch_reduces_for_plain_tensor_parallelism() -> None:
    """Without sequence parallelism the switch adds up: 480 against 370 GB/s on eight H100."""
    backend = get_backend("megatron").with_habits(tensor_parallel_overlap=False)
    context = question("llama-3-70b", machines("h100", 8), backend, seq_len=4096)
    plain, split = (step(context, tp=8, sequence_parallel=sp).layers[0] for sp in (False, True))
    ratio = plain.named("tensor-parallel traffic").forward[0] / split.named("tensor-parallel traffic").forward[0]
    assert 0.7 <= ratio <= 0.85
