"""Memory terms that depend on how a framework runs: saved tensors, losses, workspaces, states.

The sizes are counted by hand for one layer of a small model (h 512, f 2048, 8 heads of 64) and 2,048 tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.backends.base import Backend, StateFormat
from planner.backends.megatron import Megatron, te_loss_bytes, unfused_loss_bytes
from planner.backends.stacks import STACKS
from planner.cost.context import CostContext, Work
from planner.cost.step import Step
from planner.cost.workspace import workspace_bytes
from planner.specs.model import ModelSpec
from planner.units import MIB
from tests.strategies import estimated, machines, question, step_of, strategy, under

TOY = ModelSpec(name="toy", layers=4, hidden=512, ffn=2048, heads=8, kv_heads=8, head_dim=64, vocab=512, max_seq=4096)
TOKENS, H, F, HEADS, SEQ = 2048, 512, 2048, 8, 2048


def layer_bytes_per_token(backend: Backend, accelerator: str = "h100", **job: Any) -> float:
    """Saved bytes of one layer and token, everything on one GPU."""
    context = question(TOY, machines(accelerator, gpus=1), backend, global_batch=1, **job)
    return float(step_of(context).activation_bytes[0, 0]) / TOKENS


FUSED = 16 * H + 6 * F + 4 * HEADS
"""Two norms in and out, q, k, v and the attention output, gate, up and their product in 16 bits; the log-sum-exp."""


@pytest.mark.parametrize(
    ("habits", "more"),
    [
        ({}, 0),
        ({"dropout": True}, 2 * H),
        ({"eager_norms": True}, 12 * H),
        ({"attention_backend": "flash"}, 2 * H),
        ({"transformer_engine": False, "eager_copies": True}, 6 * H + 2 * H + 2 * F),
    ],
)
def test_saved_tensors(habits: dict[str, Any], more: int) -> None:
    """What every way of running adds to the fused count, bytes a token and layer."""
    assert layer_bytes_per_token(STACKS["megatron"].with_habits(**habits)) == pytest.approx(FUSED + more)


@pytest.mark.parametrize(
    ("habits", "each"), [({}, 2.0), ({"dropout": True}, 5.0), ({"score_bytes": 10.0}, 10.0)], ids=str
)
def test_stored_scores(habits: dict[str, Any], each: float) -> None:
    """The softmax output alone without dropout; with it the mask and the dropped copy (arXiv 2205.05198)."""
    stored = layer_bytes_per_token(STACKS["megatron"].with_habits(**habits), flash_attention=False)
    masks = 2 * H if habits.get("dropout") else 0
    assert stored == pytest.approx(FUSED + masks + each * HEADS * SEQ)


def test_flash_attention_keeps_two_layouts_before_hopper() -> None:
    """Transformer Engine takes FlashAttention on Ampere, whose output is saved once more for the projection."""
    megatron = STACKS["megatron"]
    assert layer_bytes_per_token(megatron, "a100") - layer_bytes_per_token(megatron, "h100") == pytest.approx(2 * H)
    deterministic = megatron.with_habits(deterministic=True)
    assert layer_bytes_per_token(deterministic, "b200") == pytest.approx(FUSED + 2 * H)
    assert layer_bytes_per_token(deterministic, "h100") == pytest.approx(FUSED)


def test_only_transformer_engine_saves_narrow_inputs() -> None:
    """Its fp8 matrices keep one byte of what they multiply; torchao keeps 16 bits."""
    assert layer_bytes_per_token(STACKS["megatron"], precision="fp8") < FUSED
    compiled = STACKS["torchtitan-compiled"]
    assert layer_bytes_per_token(compiled, precision="fp8") == layer_bytes_per_token(compiled)


def loss_bytes_per_logit(backend: Backend, tp: int = 1, **job: Any) -> float:
    """Of the whole vocabulary, the gradient of the hidden state left out."""
    context = question(TOY, machines(gpus=tp), backend, global_batch=1, **job)
    step = step_of(context, tp=tp, sequence_parallel=tp > 1)
    return float(step.loss_transient[0] - 4 * H * TOKENS) / TOKENS / float(step.ends.vocab[0])


def test_losses() -> None:
    """Megatron's three implementations, and a loss that needs the whole vocabulary on every rank."""
    megatron = STACKS["megatron"]
    assert loss_bytes_per_logit(megatron) == pytest.approx(10)
    assert loss_bytes_per_logit(megatron, loss="eager") == pytest.approx(6)
    assert loss_bytes_per_logit(megatron.with_habits(loss_bytes_per_logit=te_loss_bytes)) == pytest.approx(4)
    unfused = megatron.with_habits(loss_bytes_per_logit=unfused_loss_bytes)
    assert loss_bytes_per_logit(unfused, tp=4) == pytest.approx(6 / 4)
    aleph = STACKS["aleph-alpha"]
    assert loss_bytes_per_logit(aleph) == pytest.approx(14)
    assert loss_bytes_per_logit(aleph, tp=4) == pytest.approx(14 + 12)
    torchtitan = STACKS["torchtitan-eager"]
    assert loss_bytes_per_logit(torchtitan) == pytest.approx(12)
    assert loss_bytes_per_logit(torchtitan, tp=4) == pytest.approx((12 + 6) / 4)


@pytest.mark.parametrize(
    ("accelerator", "habits", "expected"),
    [
        ("h100", {}, 2 * 32 + 32),
        ("a100", {}, 2 * 8.125 + 4),
        ("b200", {}, 2 * 8.125 + 32),
        ("b200", {"deterministic": True}, 2 * 32 + 32),
        ("a100", {"deterministic": True}, 2 * 32 + 4),
        ("h100", {"transformer_engine": False}, 2 * 32),
    ],
)
def test_workspaces(accelerator: str, habits: dict[str, Any], expected: float) -> None:
    """MiB that Megatron-LM's functional tests show as allocated beside the states."""
    context = question(TOY, machines(accelerator, gpus=1), STACKS["megatron"].with_habits(**habits), global_batch=1)
    assert workspace_bytes(Work(context, strategy(context)))[0] == pytest.approx(expected * MIB)


def test_overlapped_tensor_parallelism_has_more_workspaces() -> None:
    """One for each of three communication streams."""
    context = question(TOY, machines(gpus=8), STACKS["megatron"], global_batch=8)
    plain = workspace_bytes(Work(context, strategy(context, tp=8, sequence_parallel=False)))
    overlapped = workspace_bytes(Work(context, strategy(context, tp=8, sequence_parallel=True)))
    assert overlapped[0] - plain[0] == pytest.approx(3 * 32 * MIB)


def test_stated_number_formats() -> None:
    """bf16 gradients and moments shrink the states; the optimizer steps on an fp32 copy of the gradients."""
    backend = Megatron().with_habits(state_format=StateFormat(2.0, 2.0, 8.0))
    context = question(TOY, machines(gpus=8), backend)
    batch = strategy(context, zero_stage=1)
    held = backend.state_bytes(context.job, batch, batch.shard_degree)
    resident = held.weights + held.gradients + held.optimizer
    assert resident[0] == pytest.approx(2 + 2 + 8 / 8)
    assert held.step_temporary[0] == pytest.approx(4 / 8)


@pytest.mark.parametrize(("global_batch", "resident"), [(8, 12 / 8), (16, 16 / 8)])
def test_gradients_of_a_single_micro_batch(global_batch: int, resident: float) -> None:
    """torchtitan frees gradients after the step: beside the loss they exist only where micro-batches accumulate."""
    stack = STACKS["torchtitan-eager"]
    context = question(TOY, machines(gpus=8), stack, global_batch=global_batch)
    batch = strategy(context, zero_stage=3)
    held = stack.state_bytes(context.job, batch, batch.shard_degree)
    assert (held.weights + held.gradients + held.optimizer)[0] == pytest.approx(resident)
    assert (held.weights + held.gradients + held.optimizer + held.step_temporary)[0] == pytest.approx(16 / 8)


def first_rank(backend: Backend) -> CostContext:
    return question(TOY, machines(gpus=4), backend, global_batch=8)


def test_stage_outputs_that_stay() -> None:
    """DeepSpeed's pipeline keeps the output of every micro-batch in flight, Megatron frees it once it is sent."""

    def saved(backend: Backend, pp: int) -> float:
        context = first_rank(backend)
        layers = TOY.layers // pp
        batch = strategy(context, pp=pp, schedule="1f1b" if pp > 1 else "none", stage_layers=(layers,) * pp)
        return float(Step(Work(context, batch), pp).first_activation_bytes[0])

    megatron = STACKS["megatron"]
    keeping = megatron.with_habits(keeps_stage_outputs=True)
    assert saved(keeping, 2) - saved(megatron, 2) == pytest.approx(2 * H * TOKENS)
    assert saved(keeping, 1) == saved(megatron, 1)


def test_bytes_of_measured_stacks() -> None:
    """Bytes a parameter over a shard of 8: BLOOM's fp16 and bf16 optimizers, nanotron with both gradients."""
    expected = {
        ("megatron-deepspeed", "fp16"): 4 + 16 / 8,
        ("megatron-deepspeed", "bf16"): 8 + 12 / 8,
        ("nanotron", "bf16"): 8 + 12 / 8,
        ("aleph-alpha", "bf16"): 4 + 12 / 8,
    }
    for (name, precision), total in expected.items():
        stack = STACKS[name]
        context = question(TOY, machines(gpus=8), stack, precision=precision)
        batch = strategy(context, zero_stage=1, shard_degree=8)
        held = stack.state_bytes(context.job, batch, np.array([8]))
        assert (held.weights + held.gradients + held.optimizer)[0] == pytest.approx(total)


@pytest.mark.parametrize(
    ("precision", "layer_bytes"), [("bf16", 2.0), ("fp8", 4.0), ("nvfp4", 2.0 + 2 * (0.5 + 1 / 16))]
)
def test_embedding_and_head_have_no_narrow_copies(precision: str, layer_bytes: float) -> None:
    """Matrices of layers are cached in the narrow format twice; the two tables are multiplied in 16 bits."""
    step = step_of(question("llama-3-8b", machines("b200", 8), precision=precision))
    table = 128_256 * 4096
    assert step.held(step.weights[0], "weights")[0] == pytest.approx(layer_bytes * step.weights[0].dense[0])
    assert step.held(step.ends.first, "weights")[0] == pytest.approx(2.0 * table)
    assert step.held(step.ends.last, "weights")[0] == pytest.approx(2.0 * table, rel=1e-4)


@pytest.mark.parametrize(("backend", "columns"), [("fsdp", {"zero_stage": 3}), ("deepspeed", {"zero_stage": 2})])
def test_offloaded_states_leave_their_own_headings(backend: str, columns: dict[str, int]) -> None:
    """Frameworks that move gradients or weights to the host as well: no heading of the tree falls below zero."""
    moved = {"offload_optimizer": 1.0, "offload_device": 1, "offload_parameters": int(backend == "fsdp")}
    tree = estimated(question("llama-2-7b", backend=backend), **columns, **moved).memory
    held = {name: under(tree.children[0].children[0], name) for name in ("weights", "gradients", "optimizer")}
    assert held["optimizer"] == 0.0
    if backend == "fsdp":
        assert held == {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    else:
        # The 16-bit gradients of the shard stay beside whole weights.
        assert held["gradients"] == pytest.approx(held["weights"] / 8)
