"""Statements of the tutorial in docs/tutorial.md: data and model parallelism.

Statements that hold are reproduced; where the tutorial is wrong or loose the precise value comes from the product and
the tutorial's own arithmetic is kept beside it to show the difference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.backends import get_backend
from planner.catalog import load_accelerator, load_system
from planner.cost.layers import recompute_s
from planner.cost.params import layer_matrices
from planner.cost.schedules import one_forward_one_backward, simulate
from planner.units import GB
from tests.reference.tutorial import (
    SEVEN_B,
    all_reduce_ms,
    all_reduce_volume_gb,
    bubble_share,
    placed,
    spec,
    states_per_param,
)
from tests.strategies import estimated, machines, names, priced, question, step_of, under
from tests.unit.test_pipeline import closed_form, split

# --- 3. Data parallelism


def test_item_16_ddp_overlaps_its_all_reduce() -> None:
    """Every GPU holds everything; the bucketed reduction hides behind backward as far as that lasts."""
    context = question(SEVEN_B, machines("h200", 8), global_batch=64, seq_len=4096)
    assert states_per_param("megatron", 0, 8) == states_per_param("megatron", 0, 1)
    step = step_of(context)
    whole = float(step.model.layer_reduce_time_s[0, 0]) * spec(SEVEN_B).layers
    exposed = under(estimated(context).time, "exposed gradient traffic")
    assert 0.0 < exposed < 0.5 * whole


def test_item_17_fsdp_modes_are_zero_stages() -> None:
    """FULL_SHARD shards all, SHARD_GRAD_OP keeps gathered weights, NO_SHARD replicates."""
    stages = {stage: states_per_param("fsdp", stage, 8 if stage else 1) for stage in (0, 2, 3)}
    assert stages[3]["total"] == 16 / 8
    assert stages[2]["total"] == 16 / 8 + 2
    assert stages[0]["total"] == 16 + 2
    assert get_backend("fsdp").zero_stages == (0, 2, 3)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_item_18_all_reduce_volume(size: int) -> None:
    """An all-reduce moves 2 (N-1)/N of its payload over each link; the tutorial's 2 is the limit."""
    assert all_reduce_volume_gb(size, 14.0) == pytest.approx(14.0 * 2 * (1 - 1 / size))
    assert all_reduce_volume_gb(8, 14.0) == pytest.approx(24.5)


def test_item_19_gradient_bytes_of_7b() -> None:
    """7B in 16 bits: 24.5 GB a GPU at eight GPUs, 49 where gradients are reduced in fp32, as Megatron does."""
    job = question().job
    sizes = {name: get_backend(name).habits.gradient_reduce_bytes(job) for name in ("deepspeed", "megatron", "fsdp")}
    assert all_reduce_volume_gb(8, 7 * sizes["deepspeed"]) == pytest.approx(24.5)
    assert all_reduce_volume_gb(8, 7 * sizes["megatron"]) == pytest.approx(49.0)
    assert sizes["fsdp"] == 4.0


def test_item_20_nvlink_time() -> None:
    """31 ms takes both directions of NVLink; at measured bus bandwidth it is 66 ms (ring) or 51 (in-switch)."""
    fabric = load_accelerator("h100").fabric
    ring, switch = fabric.all_reduce_bus_bytes_per_s, fabric.switch_reduce_bus_bytes_per_s
    assert ring is not None
    assert switch is not None
    volume = all_reduce_volume_gb(8, 14.0)
    assert 28 * GB / (2 * fabric.bytes_per_s) * 1e3 == pytest.approx(31, abs=0.5)
    assert volume * GB / ring * 1e3 == pytest.approx(66, abs=0.5)
    assert volume * GB / switch * 1e3 == pytest.approx(51, abs=0.5)
    # Inside a training step the fabric is shared: the model charges up to a fifth more than an idle one.
    assert 1.0 <= all_reduce_ms(machines("h100", 8), 8, 14 * GB) / 51 <= 1.25
    assert 1.0 <= all_reduce_ms(machines("a100", 8), 8, 14 * GB) / 106 <= 1.25


def test_item_21_across_hosts() -> None:
    """560 ms is one adapter a group; a group that owns a node's eight adapters takes an eighth of it."""
    cluster = machines("h100", 512)
    one_nic = all_reduce_ms(cluster, 64, 14 * GB, stride=8)
    assert one_nic == pytest.approx(600, rel=0.05)
    eight_nics = all_reduce_ms(machines("h100", 16), 16, 14 * GB)
    assert eight_nics == pytest.approx(72.5, rel=0.25)
    assert one_nic / eight_nics > 5


def test_item_22_overlap_has_a_price() -> None:
    """Hidden traffic is not free: compute beside it slows, 10 to 20 % of the hidden time."""
    context = question("llama-3-8b", machines("h100", 64), "fsdp", seq_len=8192, global_batch=64)
    assert 0.10 <= context.constants.sharded_traffic_slowdown <= 0.20
    step = step_of(context, zero_stage=3)
    moved = step.layer_traffic[0]
    hidden = float((moved.forward + moved.backward)[0])
    added = float(step.layer_time_s[0, 0] - step.layers[0].total()[0])
    assert added == pytest.approx(context.constants.sharded_traffic_slowdown * hidden, rel=1e-6)


# --- 4. Model parallelism


def tensor_parallel_all_reduces(sequence_parallel: bool) -> tuple[float, float, float]:
    """(forward, backward, repeated by full recomputation) of one layer, in all-reduces of its activations."""
    # What a framework hides behind its matrices is not the subject here.
    exposed = get_backend("megatron").with_habits(tensor_parallel_overlap=False)
    context = question("llama-3-70b", machines("h100", 8), exposed, seq_len=4096)
    step = step_of(context, tp=8, sequence_parallel=sequence_parallel)
    term = step.layers[0].named("tensor-parallel traffic")
    full = step.work.tokens * context.model.hidden * 2.0
    # With sequence parallelism an all-reduce is a gather and a scatter: the same bytes, but no help from the switch.
    tensor = step.groups.tensor
    one = float((2.0 * tensor.all_gather_s(full) if sequence_parallel else tensor.all_reduce_s(full))[0])
    choice = next(kind for kind in context.recompute_kinds if kind.id == "full")
    with_traffic = recompute_s(step.work, context.kinds[0], step.layers[0], choice)
    silent = recompute_s(step.work, context.kinds[0], step.layers[0], replace(choice, regathers=False))
    return float(term.forward[0]) / one, float(term.backward[0]) / one, float((with_traffic - silent)[0]) / one


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_item_23_four_all_reduces_a_layer(sequence_parallel: bool) -> None:
    """Two forward and two backward per micro-batch, two more with full recomputation."""
    forward, backward, repeated = tensor_parallel_all_reduces(sequence_parallel)
    assert (forward, backward, repeated) == pytest.approx((2.0, 2.0, 2.0))


def test_item_24_no_gather_between_paired_matrices() -> None:
    """The column-parallel output stays split: attention and MLP pay one collective pair each, not two."""
    matrices = layer_matrices(spec("llama-3-70b"), ("attention", "dense"))
    assert {m.split for m in matrices} == {"column", "row"}
    assert tensor_parallel_all_reduces(True)[0] == pytest.approx(sum(m.split == "row" for m in matrices))


def test_item_25_all_reduces_of_a_step() -> None:
    """80 layers make 320 all-reduces of 67 MB per micro-batch, so the step's count grows with the micro-batches."""
    forward, backward, _ = tensor_parallel_all_reduces(False)
    assert 80 * (forward + backward) == pytest.approx(320)
    context = question("llama-3-70b", machines("h100", 8), seq_len=4096, global_batch=4)
    step = step_of(context, tp=8)
    assert float(step.work.tokens[0]) * 2 * context.model.hidden / 1e6 == pytest.approx(67, abs=0.2)
    traffic_s = under(estimated(context, tp=8).time, "tensor-parallel traffic")
    single = replace(context, job=context.job.model_copy(update={"global_batch": 1}))
    assert traffic_s == pytest.approx(4 * under(estimated(single, tp=8).time, "tensor-parallel traffic"))


def test_item_25_time_of_one_all_reduce() -> None:
    """67 MB over eight H100 with in-switch reduction: 0.33 ms."""
    assert all_reduce_ms(machines("h100", 8), 8, 67.1e6) == pytest.approx(0.33, rel=0.25)


def test_item_26_nvlink_against_network() -> None:
    """One direction of NVLink against one adapter is 9x, not 18x; achieved rates are 7 to 10 apart."""
    device, node = load_accelerator("h100"), load_system("dgx-h100")
    assert device.fabric.bytes_per_s / node.nic_bytes_per_s == pytest.approx(9)
    cluster = machines("h100", 64)
    ratio = placed(cluster, 8).bus_bytes_per_s[0] / placed(cluster, 8, 8).bus_bytes_per_s[0]
    assert 6.5 <= ratio <= 10.0


def test_item_26_tensor_parallelism_across_nodes() -> None:
    """Llama-3-8B on 64 GPUs: TP 16 over two nodes loses 37 to 72 % of the speed of TP 8 (measured)."""
    context = question("llama-3-8b", machines("h100", 64, system="aws-p5"), seq_len=4096, global_batch=512)
    times = {tp: priced(context, tp=tp, sequence_parallel=True, zero_stage=1).step_time_s[0] for tp in (8, 16)}
    assert 0.37 <= 1.0 - times[8] / times[16] <= 0.72


def test_item_27_bandwidth_not_latency() -> None:
    """Leaving the node costs bandwidth; latency rises by a small factor only."""
    cluster = machines("h100", 64)
    inside, outside = placed(cluster, 8), placed(cluster, 8, 8)
    assert outside.latency_s[0] / inside.latency_s[0] < 4
    assert inside.bus_bytes_per_s[0] / outside.bus_bytes_per_s[0] > 6


def test_item_28_naive_pipeline() -> None:
    """One micro-batch leaves P-1 of P stages idle: 75 % at four."""
    assert bubble_share(4, 1) == pytest.approx(0.75)


@pytest.mark.parametrize(("m", "share", "of_ideal"), [(4, 0.43, 0.75), (32, 0.086, 0.094)])
def test_item_29_bubble(m: int, share: float, of_ideal: float) -> None:
    """(P-1)/(P-1+M) of the step, or (P-1)/M of the ideal time."""
    found = bubble_share(4, m)
    assert found == pytest.approx(share, abs=0.002)
    assert found / (1 - found) == pytest.approx(of_ideal, abs=0.001)


def test_item_30_backward_is_longer_than_forward() -> None:
    """Backward takes about twice forward, three times with full recomputation; equal slots misdraw the pipeline."""
    context = question("llama-3-8b", machines("h100", 8), seq_len=8192)
    step = step_of(context, recompute="full")
    forward, backward = float(step.layers[0].forward()[0]), float(step.layers[0].backward()[0])
    assert 1.9 < backward / forward < 2.3
    assert 2.9 < (backward + float(step.recompute_time_s[0, 0])) / forward < 3.3


def test_item_31_gpipe_and_1f1b() -> None:
    """Same bubble; GPipe keeps all micro-batches, 1F1B as many as stages follow."""
    both = {name: closed_form(name, 4, 16, [6] * 4) for name in ("gpipe", "1f1b")}
    assert both["gpipe"].seconds == both["1f1b"].seconds
    assert both["gpipe"].in_flight == [16.0] * 4
    assert both["1f1b"].in_flight == [4.0, 3.0, 2.0, 1.0]


def test_item_32_interleaving_and_zero_bubble() -> None:
    """(P-1)/(v M) with 1 + (P-1)/(P v) of the activations; ZB-H1 fills half of the bubble.

    Two thirds where weight gradients take a third of the time; profiled they take a quarter."""
    plain, chunked = bubble_share(4, 16), bubble_share(4, 16, "interleaved", 2)
    assert chunked / (1 - chunked) == pytest.approx((plain / (1 - plain)) / 2) == pytest.approx(3 / 32)
    kept = closed_form("interleaved", 4, 16, [3] * 8, 2).in_flight[0]
    assert kept / closed_form("1f1b", 4, 16, [6] * 4).in_flight[0] == pytest.approx(1 + 3 / 8)
    zero = bubble_share(4, 16, "zb-h1")
    assert zero / (1 - zero) == pytest.approx((plain / (1 - plain)) / 2)


def test_item_33_trace_of_1f1b() -> None:
    """F1 F2 F3 F4 B1 F5 B2 on the first of four ranks, whose simulated time is the closed form's."""
    orders = [one_forward_one_backward(rank, 4, 8) for rank in range(4)]
    assert [f"{kind}{micro + 1}" for kind, _, micro in orders[0][:7]] == ["F1", "F2", "F3", "F4", "B1", "F5", "B2"]
    assert simulate(orders, *split([6] * 4)).seconds == pytest.approx(closed_form("1f1b", 4, 8, [6] * 4).seconds)


def test_item_34_sequence_parallelism() -> None:
    """Norm activations shrink to 1/N at the same traffic: an all-reduce is a scatter and a gather."""
    context = question("llama-3-70b", machines("h100", 8), seq_len=4096)
    plain, split_up = step_of(context, tp=8).tensors[0], step_of(context, tp=8, sequence_parallel=True).tensors[0]
    for name in ("norm_input", "norm_output"):
        assert split_up[name][0] == pytest.approx(plain[name][0] / 8)
    assert split_up["qkv"][0] == plain["qkv"][0]
    assert tensor_parallel_all_reduces(True) == pytest.approx(tensor_parallel_all_reduces(False))


def test_item_35_rank_order() -> None:
    """128 = TP 8 x PP 4 x DP 4: data-parallel neighbours sit 8 apart, stages 32; stage 0 is ranks 0 to 31."""
    topology = pytest.importorskip("planner.render.topology")
    axes = tuple(topology.Axis(name, size, "") for name, size in (("tp", 8), ("dp", 4), ("pp", 4)))
    grid = topology.Topology(axes, 8)
    assert (grid.kind("dp").stride, grid.kind("pp").stride) == (8, 32)
    assert {grid.kind("pp").coordinate(rank) for rank in range(32)} == {0}
    # The cost model prices the same order: both leave the node, tensor parallelism does not.
    groups = step_of(question("llama-3-70b", machines("h100", 128), global_batch=128), tp=8, pp=4).groups
    assert (groups.tensor.crosses[0], groups.data.crosses[0], groups.pipeline.crosses[0]) == (0.0, 1.0, 1.0)


def test_item_36_data_parallel_groups() -> None:
    """TP 8 x PP 4 x DP 4 has 32 data-parallel groups of four; a drawing of some of them is no error."""
    topology = pytest.importorskip("planner.render.topology")
    grid = topology.Topology(tuple(topology.Axis(n, s, "") for n, s in (("tp", 8), ("dp", 4), ("pp", 4))), 8)
    groups = {tuple(grid.kind("dp").ranks(rank)) for rank in range(128)}
    assert len(groups) == 32
    assert (0, 8, 16, 24) in groups


def test_item_37_tensor_parallelism_stays_on_fast_links() -> None:
    """TP inside the node is the default; an NVL72 rack is wider, and a small model is faster without it."""
    assert step_of(question("llama-3-70b", machines("gb200", 64)), tp=64).groups.tensor.crosses[0] == 0.0
    small = question("llama-3.2-1b", machines("h100", 8), seq_len=4096, global_batch=64)
    alone = priced(small, zero_stage=1).step_time_s[0]
    assert alone < 0.7 * priced(small, tp=8, sequence_parallel=True, zero_stage=1).step_time_s[0]


def test_item_38_dimensions_that_the_tutorial_leaves_out() -> None:
    """Context, expert and virtual-pipeline parallelism and hybrid sharding are all priced."""
    long = question("llama-3-8b", machines("h100", 8), seq_len=32768, global_batch=2)
    assert "context-parallel traffic" in names(estimated(long, cp=4, zero_stage=1).time)
    mixture = question("mixtral-8x7b", machines("h100", 8), seq_len=4096)
    assert "expert-parallel traffic" in names(estimated(mixture, ep=8, zero_stage=1).time)
    deep = question("llama-3-8b", machines("h100", 16), global_batch=64)
    assert priced(deep, pp=4, vpp=2).step_time_s[0] != priced(deep, pp=4).step_time_s[0]
    assert get_backend("fsdp").shard_degrees(machines("h100", 64), 1, 1, 64, 3) == (64, 8)
