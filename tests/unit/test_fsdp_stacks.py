"""How records of fully sharded frameworks are read, and what sets their steps apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.accuracy.predict import predict
from planner.accuracy.runs.interpret import Case, interpret
from planner.accuracy.runs.settings import HostStates, host_states_of
from planner.backends.stacks import ACTIVATIONS_TO_HOST, STACKS, stack_named
from planner.backends.torchtitan import Torchtitan
from planner.catalog import load_model
from planner.cost.attention import attention_s
from planner.cost.context import Work
from planner.cost.optimizer import host_link_bytes_per_s
from planner.specs.measurement import MeasuredRun
from tests.strategies import machines, question, step_of, strategy

LLAMA = {"name": "llama-3-8b", "seq_len": 8192}


def record(framework: str, *, gpus: int = 16, gpu: str = "h100-80gb-sxm", **run: Any) -> MeasuredRun:
    """A run of Llama-3-8B, fully sharded, two sequences a GPU."""
    tp = run.get("tp", 1)
    config = {
        "framework": framework, "precision": "bf16", "tp": 1, "pp": 1, "cp": 1, "dp": gpus // tp, "zero": 3,
        "micro_batch": 2, "global_batch": 2 * gpus // tp, "recompute": "full", "flash_attention": True, **run,
    }  # fmt: skip
    hardware = {"gpu": gpu, "gpus": gpus, "gpus_per_node": 8}
    return MeasuredRun.model_validate({"id": f"test/{framework}", "model": LLAMA, "hardware": hardware, "run": config})


def read(framework: str, **run: Any) -> Case:
    return interpret(record(framework, **run))


def seconds(framework: str, **run: Any) -> float:
    time = predict([read(framework, **run)])[0].step_time_s
    assert time is not None
    return time


@pytest.mark.parametrize(
    ("framework", "stack"),
    [
        ("fms-fsdp", "fms-fsdp"), ("xtuner", "xtuner"), ("internevo", "internevo"), ("primus", "primus"),
        ("maxtext", "xla-fsdp"), ("paxml", "paxml"), ("transformers (fsdp2)", "transformers"),
        ("megatron-fsdp", "megatron-fsdp"),
    ],
)  # fmt: skip
def test_frameworks_have_their_stack(framework: str, stack: str) -> None:
    assert stack_named(framework) == (STACKS[stack], True)


@pytest.mark.parametrize(
    ("extra", "stack"),
    [
        ({"compile": True}, "torchtitan-compiled"),
        ({"compile": True, "fp8": "float8-rowwise"}, "torchtitan-rowwise"),
        ({"compile": "aot_fx_trace"}, "torchtitan-traced"),
        ({}, "torchtitan-eager"),
    ],
)
def test_compilation_and_recipe_choose_the_torchtitan_stack(extra: dict[str, object], stack: str) -> None:
    assert read("torchtitan", extra=extra).context.backend.name == stack


def test_automodel_is_named_by_its_version() -> None:
    assert read("fsdp2", version="nemo-automodel 1.0").context.backend.name == "automodel"


def test_async_tensor_parallelism_hides_traffic() -> None:
    plain, hidden = (seconds("torchtitan", tp=8, overlap={"tp_comm": on}) for on in (False, True))
    assert hidden < 0.97 * plain


def test_pure_mixed_precision_reduces_half_the_bytes() -> None:
    pure, default = (read("llm-foundry", extra={"fsdp_mixed_precision": mode}) for mode in ("PURE", "DEFAULT"))
    reduced = [case.context.backend.habits.gradient_reduce_bytes(case.context.job) for case in (pure, default)]
    assert reduced == [2.0, 4.0]


def test_unstated_sharding_is_what_the_framework_is_built_for() -> None:
    assert read("xtuner", zero=None).batch.zero_stage[0] == 3
    assert read("megatron-lm", zero=None).batch.zero_stage[0] == 1


@pytest.mark.parametrize(
    ("extra", "degree"), [({}, 16), ({"fsdp_size": 4}, 4), ({"zero1": 8}, 8), ({"fsdp_sharding_strategy": "HSDP"}, 8)]
)
def test_shard_degree(extra: dict[str, object], degree: int) -> None:
    assert read("fms-fsdp", extra=extra).batch.shard_degree[0] == degree


@pytest.mark.parametrize(
    ("words", "states"),
    [
        (None, HostStates(0.0, parameters=False)),
        ("activations of 40 layers per GPU to CPU", HostStates(0.0, parameters=False)),
        ("optimizer to CPU, fraction 0.25", HostStates(0.25, parameters=False)),
        ("optimizer+params (gemini cpu)", HostStates(1.0, parameters=True)),
        ("gemini auto", HostStates(1.0, parameters=False)),
    ],
)
def test_states_in_host_memory(words: str | None, states: HostStates) -> None:
    assert host_states_of(record("colossalai", offload=words).run) == states


def test_a_solver_lands_between_none_and_full() -> None:
    none, solved, full = (seconds("torchtitan", recompute=c) for c in ("none", "modules:solver-chosen", "full"))
    assert none < solved < full


def test_torchtitan_counts_both_ends_as_layers() -> None:
    """Llama-3.1-405B: 126 layers and two ends over 8 stages make 16 each."""
    model = load_model("llama-3.1-405b").spec
    assert Torchtitan().default_layout(model, 8, 1) == (15, *[16] * 6, 15)
    assert Torchtitan().default_layout(model, 64, 2) is None


def test_paxml_writes_scores_unless_it_says_otherwise() -> None:
    assert read("paxml", flash_attention=None).context.job.flash_attention is False
    assert read("paxml", flash_attention=True).context.job.flash_attention is True
    assert read("maxtext", flash_attention=None).context.job.flash_attention is True


def test_activations_in_host_memory_wait_for_the_link_only_beyond_compute() -> None:
    """Over PCIe the copies of every layer take longer than its compute; every fourth layer has four to hide behind."""
    backend = STACKS["megatron-fsdp"].with_recompute(ACTIVATIONS_TO_HOST)
    context = question("llama-3-8b", machines("h100", 8), backend, seq_len=8192)
    every, fourth = (
        step_of(context, zero_stage=3, recompute="cpu_offloading", recompute_layers=layers) for layers in (32, 8)
    )
    layer = every.layers[0]
    copy_s = float(every.recompute_saved_bytes[0, 0]) / host_link_bytes_per_s(context.cluster)
    waits = [max(copy_s - float(side[0]), 0.0) for side in (layer.forward(), layer.backward())]
    assert every.recompute_time_s[0, 0] == pytest.approx(sum(waits))
    assert sum(waits) > 0.0
    assert fourth.recompute_time_s[0, 0] < every.recompute_time_s[0, 0] / 4


def test_host_holds_what_waits_there() -> None:
    backend = STACKS["megatron-fsdp"].with_recompute(ACTIVATIONS_TO_HOST)
    context = question("llama-3-8b", machines("h100", 8), backend, seq_len=8192)
    half, whole = (
        step_of(context, zero_stage=3, recompute="cpu_offloading", recompute_layers=layers) for layers in (16, 32)
    )
    added = whole.model.fixed_host_bytes - half.model.fixed_host_bytes
    assert added[0] == pytest.approx(16 * float(whole.recompute_saved_bytes[0, 0]))


def test_narrow_heads_attend_more_slowly() -> None:
    """The same FLOPs in twice as many heads of half the width: exponentials take a larger share."""
    model = load_model("llama-2-7b").spec
    narrow = model.model_copy(update={"heads": 64, "kv_heads": 64, "head_dim": 64})
    forward = []
    for spec in (model, narrow):
        context = question(spec, machines("h100", 1), "fsdp", global_batch=1, seq_len=32768)
        forward.append(attention_s(Work(context, strategy(context)), context.kinds[0])[0])
    assert 1.1 < float(forward[1][0] / forward[0][0]) < 1.4


def test_fp8_casts_are_one_kernel_in_every_framework() -> None:
    """Eager elementwise kernels move more; the cast of a matrix input does not."""
    eager, fused = (
        step_of(question("llama-2-7b", machines("h100", 8), STACKS[name], precision="fp8")).layers[0]
        for name in ("torchtitan-eager", "torchtitan-compiled")
    )
    assert np.array_equal(eager.named("fp8 casts").forward, fused.named("fp8 casts").forward)
    assert eager.named("norms").forward[0] > 1.5 * fused.named("norms").forward[0]


def test_megatron_fsdp_gathers_two_blocks() -> None:
    """Weights of two blocks whole, and the 16-bit gradients of two, where parameters are sharded."""
    found = step_of(question("llama-3-8b", machines("h100", 8), STACKS["megatron-fsdp"]), zero_stage=3)
    block = found.weights[0].dense[0]
    assert found.buffers["gathered blocks"][0] == 2 * 2.0 * block
    assert found.buffers["unsharded gradients"][0] == 2 * 2.0 * block
    whole = step_of(question("llama-3-8b", machines("h100", 8), STACKS["megatron-fsdp"]))
    assert whole.buffers["gathered blocks"][0] == 0.0
