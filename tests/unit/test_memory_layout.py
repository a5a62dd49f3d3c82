"""What records of measured runs say about memory, in the words of their sources."""

from __future__ import annotations

from typing import Any

import pytest

from planner.accuracy.runs.memory_layout import memory_habits, optimizer_instances
from planner.accuracy.runs.settings import host_states_of, recomputations_of
from planner.backends.base import StateFormat
from planner.backends.megatron import native_loss_bytes, te_loss_bytes, unfused_loss_bytes
from planner.backends.stacks import STACKS
from planner.catalog import load_model
from planner.specs.measurement import MeasuredConfiguration
from tests.strategies import question, step_of


def habits(framework: str, stack: str = "megatron", **extra: Any) -> dict[str, Any]:
    run = MeasuredConfiguration(framework=framework, extra=extra)
    return memory_habits(run, STACKS[stack], "bf16")


@pytest.mark.parametrize(
    ("framework", "extra", "loss"),
    [
        ("megatron-lm", {}, unfused_loss_bytes),
        ("megatron-lm", {"cross_entropy_fusion": True}, te_loss_bytes),
        ("megatron-lm", {"args": {"cross-entropy-loss-fusion": True}}, native_loss_bytes),
        (
            "megatron-lm",
            {"args": {"cross-entropy-loss-fusion": True, "cross-entropy-fusion-impl": "te"}},
            te_loss_bytes,
        ),
        ("nemo", {}, native_loss_bytes),
        ("megatron-bridge", {}, te_loss_bytes),
    ],
)
def test_loss(framework: str, extra: dict[str, Any], loss: object) -> None:
    """Megatron-LM fuses the loss only when told to, natively unless told otherwise."""
    assert habits(framework, **extra)["loss_bytes_per_logit"] is loss


def test_arguments() -> None:
    """Arguments that are absent have Megatron-LM's defaults: dropout, fused accumulation."""
    plain = habits("megatron-lm", args={})
    assert plain["dropout"]
    assert plain["fused_gradient_accumulation"]
    assert plain["transformer_engine"]
    set_ = habits(
        "megatron-lm",
        args={
            "hidden-dropout": 0.0,
            "no-gradient-accumulation-fusion": True,
            "transformer-impl": "local",
            "deterministic-mode": True,
            "microbatch-group-size-per-virtual-pipeline-stage": 5,
        },
    )
    assert not set_["dropout"]
    assert not set_["fused_gradient_accumulation"]
    assert not set_["transformer_engine"]
    assert set_["deterministic"]
    assert set_["interleaving_group"] == 5


@pytest.mark.parametrize(
    ("framework", "extra", "expected"),
    [
        ("megatron-lm", {}, None),
        ("megatron-lm", {"main_grads": "bf16", "optimizer_moments": "bf16"}, StateFormat(2.0, 2.0, 8.0)),
        ("megatron-lm", {"main_grads": "fp32", "optimizer_moments": "bf16"}, StateFormat(2.0, 4.0, 8.0)),
        ("nemo", {}, StateFormat(2.0, 2.0, 12.0)),
        ("megatron-bridge", {"recipe_settings": {"ddp.grad_reduce_in_fp32": "True"}}, None),
        (
            "megatron-bridge",
            {"recipe_settings": {"optimizer.exp_avg_dtype": "torch.bfloat16"}},
            StateFormat(2.0, 2.0, 8.0),
        ),
        ("megatron-lm", {"args": {"grad-reduce-in-bf16": True}}, StateFormat(2.0, 2.0, 12.0)),
    ],
)
def test_number_formats(framework: str, extra: dict[str, Any], expected: StateFormat | None) -> None:
    """Recipes of NeMo and Megatron-Bridge keep gradients in bf16 unless they say otherwise."""
    assert habits(framework, **extra)["state_format"] == expected


def test_kernels_of_the_layout_study() -> None:
    """Only the kernel with RMS in its name spares the tensors of an eager norm."""
    fused = habits("aleph-alpha-scaling", "aleph-alpha", kernel="flash_attention2 + RMS kernel")
    plain = habits("aleph-alpha-scaling", "aleph-alpha", kernel="torch")
    assert not fused["eager_norms"]
    assert plain["eager_norms"]
    assert plain["score_bytes"] > fused["score_bytes"]
    assert habits("nanotron", "nanotron") == {}


def test_offload() -> None:
    """The share of the optimizer that went to the host, and groups that each hold the whole optimizer."""
    words = ("none", "optimizer to CPU", "optimizer to CPU, fraction 0.25, D2H/H2D overlap", "activations of 20 layers")
    shares = [host_states_of(MeasuredConfiguration(offload=text)).optimizer for text in words]
    assert shares == [0.0, 1.0, 0.25, 0.0]
    arguments = {"num-distributed-optimizer-instances": 2}
    assert optimizer_instances(MeasuredConfiguration(extra={"args": arguments})) == 2
    assert optimizer_instances(MeasuredConfiguration()) == 1


def test_offloaded_activations() -> None:
    """Named modules lose their inputs; whole layers lose everything, and nothing is computed again."""
    model, stack = load_model("llama-2-7b").spec, STACKS["megatron"]
    fine = MeasuredConfiguration(recompute="none", offload="fine-grained activations: core_attn,attn_proj")
    (choice,) = recomputations_of(fine, model, stack)
    assert choice.kind.drops == {"qkv", "attention_output"}
    assert not choice.kind.repeats
    whole = MeasuredConfiguration(recompute="none", offload="activations of 20 layers per GPU to CPU")
    (choice,) = recomputations_of(whole, model, stack)
    assert choice.layers == 20
    assert "mlp_up" in choice.kind.drops
    assert not choice.kind.repeats
    experts = load_model("mixtral-8x7b").spec
    (choice,) = recomputations_of(MeasuredConfiguration(recompute="modules:mlp"), experts, stack)
    assert not choice.kind.drops & step_of(question("mixtral-8x7b")).tensors[0].keys()
