"""Fine-tuning: adapters beside frozen weights, and samples packed into sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.backends import get_backend
from planner.cost.flops import model_flops_per_token
from planner.cost.params import layer_matrices
from planner.specs.job import LORA_RANK, Job
from tests.strategies import estimated, machines, question, step_of

SEVEN_B = "llama-2-7b"
ONE_SAMPLE = 256


def test_full_fine_tuning_costs_what_pretraining_costs() -> None:
    pretraining, tuning = (estimated(question(SEVEN_B, machines(gpus=8), task=task)) for task in ("pretrain", "sft"))
    assert tuning.step_time_s == pretraining.step_time_s
    assert tuning.peak_memory_bytes == pretraining.peak_memory_bytes


def test_frozen_matrices_have_no_weight_gradient() -> None:
    """Backward is one GEMM instead of two: about as long as forward."""
    trained, frozen = (step_of(question(SEVEN_B, task=task)).layers[0] for task in ("pretrain", "lora"))
    matrices = frozen.named("mlp matrices")
    assert np.array_equal(matrices.forward, trained.named("mlp matrices").forward)
    assert matrices.backward[0] == pytest.approx(matrices.forward[0], rel=0.05)
    assert trained.named("mlp matrices").backward[0] > 1.8 * matrices.forward[0]


def test_adapters_count_rank_times_both_sides_of_every_matrix() -> None:
    context = question(SEVEN_B, task="lora")
    weights = step_of(context).weights[0]
    matrices = layer_matrices(context.model, context.kinds[0])
    assert weights.trained.dense[0] == LORA_RANK * sum(m.inputs + m.outputs for m in matrices)
    assert weights.dense[0] > 80 * weights.trained.dense[0]


def test_adapters_on_query_key_value_only_are_cheaper() -> None:
    both = {targets: step_of(question(SEVEN_B, task="lora", lora_targets=targets)) for targets in ("all", "qkv")}
    seconds = {targets: float(step.layers[0].named("adapters").forward[0]) for targets, step in both.items()}
    trained = {targets: float(step.weights[0].trained.dense[0]) for targets, step in both.items()}
    assert 0 < seconds["qkv"] < seconds["all"] / 3
    assert trained["qkv"] == 3 * LORA_RANK * (4096 + 4096) < trained["all"]


def test_only_adapters_are_reduced_and_updated() -> None:
    """ZeRO-1: traffic once a step and the optimizer shrink with the trained parameters; a stage-3 gather does not."""
    once = {
        task: step_of(question(SEVEN_B, task=task), zero_stage=1).layer_traffic[0].once[0] for task in ("sft", "lora")
    }
    assert once["lora"] < once["sft"] / 50
    sharded = {
        task: step_of(question(SEVEN_B, machines(gpus=64), "fsdp", global_batch=64, task=task), zero_stage=3)
        for task in ("sft", "lora")
    }
    moved = {task: step.layer_traffic[0] for task, step in sharded.items()}
    assert moved["lora"].forward[0] == moved["sft"].forward[0] > 0
    assert moved["lora"].backward[0] < moved["sft"].backward[0]
    assert sharded["lora"].model.layer_optimizer_time_s[0, 0] < sharded["sft"].model.layer_optimizer_time_s[0, 0] / 50


@pytest.mark.parametrize("backend", ["megatron", "fsdp", "deepspeed"])
def test_frozen_weights_hold_two_bytes(backend: str) -> None:
    """Gradients and optimizer states exist for adapters only: a 7B model takes little more than its 16-bit weights."""
    step = step_of(question(SEVEN_B, machines(gpus=1), backend, task="lora", global_batch=1))
    weights = step.weights[0]
    states = float(step.resident(weights)[0]) / float(weights.dense[0])
    assert 2.0 < states < 2.0 + 20.0 * float(weights.trained.dense[0] / weights.dense[0])


def test_frozen_weights_are_spread_at_stage_3_only() -> None:
    context = question(SEVEN_B, machines(gpus=8), "fsdp", task="lora")
    kept, spread = (float(step_of(context, zero_stage=stage).frozen_bytes[0]) for stage in (2, 3))
    assert (kept, spread) == (2.0, 2.0 / 8)


def test_embedding_and_head_have_no_adapters() -> None:
    step = step_of(question(SEVEN_B, task="lora"))
    assert step.ends.first.trained.dense[0] == step.ends.last.trained.dense[0] == 0
    assert step.first_time.terms[0].backward[0] == 0.0


def test_shared_adapter_of_routed_experts() -> None:
    """All experts of a rank have one adapter, so their number does not matter."""
    few, many = (
        step_of(question("mixtral-8x7b", machines(gpus=8), task="lora"), ep=ep).weights[0].trained.expert[0]
        for ep in (1, 8)
    )
    assert few == many > 0


def test_flops_of_frozen_weights() -> None:
    """Four instead of six FLOPs per weight and token; attention is the same."""
    model = question(SEVEN_B).model
    trained, frozen = (model_flops_per_token(model, 2048, frozen=frozen) for frozen in (False, True))
    short = [model_flops_per_token(model, 1, frozen=frozen) for frozen in (False, True)]
    assert short[1] / short[0] == pytest.approx(2 / 3, rel=1e-3)
    assert trained - short[0] == pytest.approx(frozen - short[1])


def test_packed_samples_attend_to_themselves_only() -> None:
    whole, packed = (step_of(question(SEVEN_B, sample_tokens=size)).layers[0] for size in (None, ONE_SAMPLE))
    assert packed.named("core attention").forward[0] < whole.named("core attention").forward[0] / 4
    assert packed.host_floor[0] == whole.host_floor[0]


def test_samples_longer_than_the_sequence_are_cut() -> None:
    assert Job(seq_len=2048, global_batch=1, sample_tokens=4096).attended_tokens == 2048


def test_rotary_of_each_sample_takes_host_time() -> None:
    """One more sample costs its kernels, whatever its length."""
    backend = get_backend("megatron")
    context = question(SEVEN_B, backend=backend.with_habits(rotary_sample_by_sample=True), sample_tokens=ONE_SAMPLE)
    twice = replace(context, job=context.job.model_copy(update={"sample_tokens": ONE_SAMPLE // 2}))
    plain = replace(context, job=context.job.model_copy(update={"sample_tokens": None}))
    floors = [float(step_of(each).layers[0].host_floor[0]) for each in (plain, context, twice)]
    assert floors[2] - floors[1] == pytest.approx(floors[1] - floors[0])
    assert floors[1] > floors[0]


def test_frozen_tables_bring_no_gradients_back() -> None:
    """Neither a scatter of the embedding's gradient over the tensor-parallel ranks nor a sum over its two copies."""
    steps = {
        task: step_of(question("llama-3.2-1b", machines(gpus=8), task=task), tp=2, pp=2, sequence_parallel=True)
        for task in ("pretrain", "lora")
    }
    traffic = {task: next(t for t in step.first_time.terms if t.communication) for task, step in steps.items()}
    assert traffic["lora"].forward[0] == traffic["pretrain"].forward[0] == traffic["pretrain"].backward[0] > 0.0
    assert traffic["lora"].backward[0] == 0.0
    assert steps["lora"].constant_time[0] == steps["lora"].work.context.constants.step_overhead_s
    assert steps["pretrain"].constant_time[0] > steps["lora"].constant_time[0]


def test_joint_inputs_of_prediction_blocks_are_frozen_too() -> None:
    """The 2h x h projection has no weight gradient: backward takes about as long as forward."""
    step = step_of(question("deepseek-v3", machines("h100", 64), task="lora", global_batch=64), ep=64)
    block = next(term for term in step.last_time.terms if term.name == "prediction blocks")
    layers = [step.layers[step.work.context.kinds.index(kind)] for kind in step.work.context.model.prediction_kinds()]
    join = [
        getattr(block, way)[0] - sum(getattr(layer, way)()[0] for layer in layers) for way in ("forward", "backward")
    ]
    assert join[1] == pytest.approx(join[0], rel=0.1)
