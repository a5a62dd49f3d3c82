"""Statements of the tutorial in docs/tutorial.md: ZeRO, mixed precision and other techniques.

Statements that hold are reproduced; where the tutorial is wrong or loose the precise value comes from the product and
the tutorial's own arithmetic is kept beside it to show the difference.
"""

from __future__ import annotations

import re

import pytest

from planner.backends import get_backend
from planner.catalog import load_accelerator
from planner.cost.params import layer_params
from planner.errors import InputError
from planner.units import GB
from tests.reference.tutorial import (
    ROOT,
    SEVEN_B,
    bubble_share,
    paper_states,
    rendered_sources,
    shard_volume,
    spec,
    states_per_param,
)
from tests.strategies import estimated, machines, names, priced, question, step_of, under

# --- 5. ZeRO


def test_item_39_redundancy() -> None:
    """Eight replicas of 7B hold 896 GB, 784 of them copies."""
    held = 8 * states_per_param("deepspeed", 0)["total"] * 7
    needed = states_per_param("deepspeed", 0)["total"] * 7
    assert (held, held - needed) == (896.0, 784.0)
    assert (held - needed) / held == pytest.approx(7 / 8)


def test_item_40_zero_1() -> None:
    """Master weights are optimizer state: 7P at four GPUs (9P in Megatron-LM), limit 4P; not 10P and 8P."""
    assert paper_states(1, 4) == 7.0
    assert states_per_param("megatron", 1, 4)["total"] == 9.0
    assert 1 - paper_states(1, 4) / 16 == pytest.approx(0.56, abs=0.005)
    assert paper_states(1, 10**6) == pytest.approx(4.0, abs=1e-3)
    # DeepSpeed accumulates bf16 gradients in fp32 besides, four bytes more.
    assert states_per_param("deepspeed", 1, 4)["total"] == 11.0


def test_item_41_zero_2() -> None:
    """2P + 14P/N = 5.5P at four GPUs, 6.5P with DeepSpeed's fp32 accumulation, limit 2P; not 7P and 4P."""
    assert paper_states(2, 4) == 5.5
    assert 1 - paper_states(2, 4) / 16 == pytest.approx(0.66, abs=0.005)
    assert states_per_param("deepspeed", 2, 4)["total"] == 2 + 18 / 4
    assert paper_states(2, 10**6) == pytest.approx(2.0, abs=1e-3)


def test_item_42_zero_3() -> None:
    """16P/N: 4P at four GPUs; DeepSpeed 18P/N; both keep gathered blocks besides."""
    assert states_per_param("fsdp", 3, 4)["total"] == 4.0
    assert states_per_param("deepspeed", 3, 4)["total"] == 18 / 4
    fsdp = estimated(question(SEVEN_B, machines("h100", 8), "fsdp"), zero_stage=3).memory
    block = layer_params(spec(SEVEN_B), ("attention", "dense")).total
    assert under(fsdp, "gathered blocks") == pytest.approx(2 * 2 * block)
    assert {"gathered embedding and head", "unsharded gradients"} <= names(fsdp)
    deepspeed = estimated(question(SEVEN_B, machines("h100", 8), "deepspeed"), zero_stage=3).memory
    assert under(deepspeed, "gathered parameters") > 0


def test_item_43_the_fp32_split() -> None:
    """4P + 4P + 8P/N belongs to fp32 training, where it is right: 10P at four GPUs."""
    fp32 = states_per_param("megatron", 1, 4, "fp32")
    assert fp32 == {"weights": 4.0, "gradients": 4.0, "optimizer": 2.0, "total": 10.0}
    assert fp32 != states_per_param("megatron", 1, 4)


def test_item_44_ddp_traffic() -> None:
    """Replicas all-reduce once a step: 2P."""
    assert shard_volume(0) == 2.0


def test_item_45_zero_1_traffic() -> None:
    """Scatter P and gather P: 2P, as much as DDP, not 3P."""
    assert shard_volume(1) == 2.0


def test_item_46_zero_2_traffic() -> None:
    """2P with one micro-batch; gradients are scattered in each, m P + P."""
    assert shard_volume(2) == 2.0
    assert shard_volume(2, 8) == 9.0


def test_item_47_zero_3_traffic() -> None:
    """Two gathers and a scatter: 3P per micro-batch, 1.5x DDP, not 5P and 2.5x."""
    assert shard_volume(3) == 3.0
    assert shard_volume(3) / shard_volume(0) == 1.5
    assert shard_volume(3, 8) == 24.0


def test_item_48_when_zero_3_pays() -> None:
    """Tokens per GPU decide, not the GPU count: few leave the traffic bare, many hide it."""

    def exposed_share(micro_batch: int) -> float:
        context = question("llama-3-8b", machines("h100", 64), "fsdp", seq_len=1024, global_batch=64 * micro_batch)
        step = step_of(context, zero_stage=3, micro_batch=micro_batch)
        return float(step.layer_time_s[0, 0] / step.layers[0].total()[0]) - 1.0

    assert exposed_share(1) > 0.5
    assert exposed_share(8) < 0.10


def test_item_49_offload() -> None:
    """An offloaded optimizer leaves GPU memory, enters host memory and costs time."""
    context = question(SEVEN_B, machines("a100", 8), "deepspeed", global_batch=64)
    here = priced(context, zero_stage=2)
    away = priced(context, zero_stage=2, offload_optimizer=1.0, offload_device=1)
    assert away.peak_memory_bytes[0] < here.peak_memory_bytes[0]
    assert away.host_memory_bytes_per_node[0] > here.host_memory_bytes_per_node[0] + 100 * GB
    assert away.step_time_s[0] > 1.1 * here.step_time_s[0]


# --- 6. Mixed precision


def test_item_50_tensor_core_rates() -> None:
    """H100: 16-bit matrices 14.8x the plain fp32 rate, but 2x TF32, which PyTorch would use."""
    peak = load_accelerator("h100").peak
    assert peak.bf16 is not None
    assert peak.fp32 is not None
    assert peak.tf32 is not None
    assert peak.bf16 / peak.fp32 == pytest.approx(14.8, abs=0.1)
    assert peak.bf16 / peak.tf32 == pytest.approx(2.0, abs=0.01)


def test_item_51_communication_is_not_always_halved() -> None:
    """DeepSpeed reduces bf16 gradients in 2 bytes; Megatron and FSDP keep 4, as in fp32."""
    half, full = (question(precision=p).job for p in ("bf16", "fp32"))
    reduces = {name: get_backend(name).habits.gradient_reduce_bytes for name in ("megatron", "deepspeed", "fsdp")}
    ratio = {name: size(half) / size(full) for name, size in reduces.items()}
    assert ratio == {"megatron": 1.0, "deepspeed": 0.5, "fsdp": 1.0}


def test_item_52_bf16_needs_ampere() -> None:
    """V100 multiplies fp16 and refuses bf16; Ampere does both."""
    assert load_accelerator("v100").peak.fp16
    with pytest.raises(InputError, match="bf16"):
        _ = question(cluster=machines("v100", 8)).dense_flops_per_s
    assert question(cluster=machines("a100", 8)).dense_flops_per_s > 3e14


def test_item_53_loss_scaling() -> None:
    """fp16 configurations scale the loss, bf16 ones do not."""
    source = (ROOT / "planner" / "render" / "deepspeed.py").read_text(encoding="utf-8")
    fp16 = next(line for line in source.splitlines() if '"fp16": {"enabled": True' in line)
    assert "loss_scale" in fp16
    bf16 = [line for line in source.splitlines() if '"bf16": {' in line]
    assert bf16
    assert not any("loss_scale" in line for line in bf16)


def test_item_54_mixed_precision_does_not_halve_states() -> None:
    """States stay at 16 (or grow to 18) bytes; activations halve."""
    assert states_per_param("megatron", 0, precision="fp32")["total"] == states_per_param("deepspeed", 0)["total"] == 16
    full = step_of(question(SEVEN_B, machines("h100", 8), precision="fp32")).activation_bytes[0, 0]
    half = step_of(question(SEVEN_B, machines("h100", 8))).activation_bytes[0, 0]
    assert full / half == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    ("model", "columns"), [("llama-3-8b", {"cp": 2}), ("llama-3-70b", {"tp": 4, "pp": 4, "cp": 2})]
)
def test_item_55_fp8(model: str, columns: dict[str, int]) -> None:
    """fp8 makes a step 1.2 to 1.6 times as fast, not twice."""
    gpus = 8 if model == "llama-3-8b" else 64
    times = {}
    for precision in ("bf16", "fp8"):
        context = question(model, machines("h100", gpus), seq_len=8192, global_batch=128, precision=precision)
        times[precision] = priced(context, zero_stage=1, sequence_parallel="tp" in columns, **columns).step_time_s[0]
    assert 1.2 <= times["bf16"] / times["fp8"] <= 1.6


def test_item_56_no_deprecated_calls_are_written() -> None:
    """What the planner writes uses neither torch.cuda.amp nor a scale argument of the optimizer step."""
    text = rendered_sources()
    assert "torch.cuda.amp" not in text
    assert not re.search(r"\.step\(\s*scale", text)


# --- 7. Other techniques


def test_item_57_gradient_accumulation() -> None:
    """Memory of one micro-batch, same work per token; the once-a-step part and the bubble are spread thinner."""
    short, long = (question(SEVEN_B, machines("h200", 8), global_batch=size) for size in (16, 256))
    one, many = priced(short, zero_stage=1), priced(long, zero_stage=1)
    assert one.peak_memory_bytes[0] == many.peak_memory_bytes[0]
    assert many.step_time_s[0] / 256 < one.step_time_s[0] / 16
    assert bubble_share(4, 32) < bubble_share(4, 4)


def test_item_58_checkpointing() -> None:
    """Full recomputation keeps 2h a token and layer, still linear in the layers, for a third more work."""
    context = question(SEVEN_B, machines("h100", 8))
    step = step_of(context, recompute="full")
    kept = float((step.activation_bytes - step.recompute_saved_bytes)[0, 0])
    assert kept == pytest.approx(2 * 2048 * context.model.hidden)
    assert 0.29 <= float(step.recompute_time_s[0, 0] / step.layer_time_s[0, 0]) <= 0.39
    scores = question("megatron-22b", machines("a100", 8), flash_attention=False)
    selective = step_of(scores, tp=8, sequence_parallel=True, recompute="core_attn")
    everything = step_of(scores, tp=8, sequence_parallel=True, recompute="full")
    assert selective.recompute_time_s[0, 0] < 0.5 * everything.recompute_time_s[0, 0]


def test_item_59_zero_3_shards_states_only() -> None:
    """Eight times the GPUs: states an eighth, activations, logits and overhead as before."""
    trees = [
        estimated(question(SEVEN_B, machines("h100", gpus), "fsdp", global_batch=gpus), zero_stage=3).memory
        for gpus in (8, 64)
    ]
    few, many = (tree.children[0].children[0] for tree in trees)
    for name in ("weights", "gradients", "optimizer"):
        assert under(few, name) == pytest.approx(8 * under(many, name))
    for name in ("activations", "logits and loss", "buffers"):
        assert under(few, name) == pytest.approx(under(many, name))
