"""Every rule of DeepSpeed: a strategy that keeps all of them, and one that breaks just that rule."""

from __future__ import annotations

from typing import Any

import pytest

from planner.backends import BACKENDS
from planner.backends.deepspeed_rules import balanced
from planner.specs.batch import DEVICES
from planner.specs.model import WindowSpec
from tests.helpers import (
    RuleCase,
    Situation,
    accelerator,
    check_rule_case,
    deepseek_v3,
    gpt13b,
    h100_cluster,
    llama8b,
    llama70b,
    make_job,
    mamba_hybrid,
    mixtral,
    v100,
)

DEEPSPEED = BACKENDS["deepspeed"]
CPU, NVME = DEVICES.index("cpu"), DEVICES.index("nvme")


def zero3() -> Situation:
    """70B on 128 GPUs with ZeRO-3."""
    columns = {"dp": 128, "zero_stage": 3, "shard_degree": 128, "stage_layers": [80]}
    return Situation(llama70b(), h100_cluster(128), make_job(), columns)


def zero2() -> Situation:
    """8B on 16 GPUs with ZeRO-2."""
    columns = {"dp": 16, "zero_stage": 2, "shard_degree": 16, "stage_layers": [32]}
    return Situation(llama8b(), h100_cluster(16), make_job(), columns)


def tensor() -> Situation:
    """70B with AutoTP 8 and ZeRO-2."""
    columns = {"tp": 8, "dp": 16, "zero_stage": 2, "shard_degree": 16, "stage_layers": [80]}
    return Situation(llama70b(), h100_cluster(128), make_job(), columns)


def ulysses() -> Situation:
    """70B with sequences over 8 ranks and ZeRO-3."""
    columns = {"cp": 8, "dp": 16, "zero_stage": 3, "shard_degree": 128, "stage_layers": [80]}
    return Situation(llama70b(), h100_cluster(128), make_job(seq_len=65536), columns)


def pipeline() -> Situation:
    """13B in fp16 over three pipeline stages of unequal size."""
    columns = {
        "pp": 3,
        "schedule": "1f1b",
        "dp": 8,
        "zero_stage": 1,
        "shard_degree": 8,
        "stage_layers": [14, 13, 13],
    }
    return Situation(gpt13b(), h100_cluster(24), make_job(seq_len=2048, precision="fp16"), columns)


CASES = [
    RuleCase(
        "gpu-vendor", zero3, {"cluster": h100_cluster(128, accelerator=accelerator("g", vendor="intel"))}, ("intel",)
    ),
    RuleCase("fp8-not-offered", zero3, {"job": make_job(precision="fp8")}, ("fp8",)),
    RuleCase("loss-implementation", zero3, {"job": make_job(loss="fused")}, ("fused",)),
    RuleCase("number-format", zero2, {"cluster": h100_cluster(16, accelerator=v100())}, ("bf16", "v100")),
    RuleCase("world-size", zero2, {"cluster": h100_cluster(32)}, ("dp(16)", "= 16", "gpus(32)")),
    RuleCase("batch-divisible", zero2, {"micro_batch": 3}, ("512", "micro_batch(3) * dp(16)", "= 32")),
    RuleCase(
        "stages-within-layers",
        pipeline,
        {"model": gpt13b(layers=2), "stage_layers": [1, 1, 0]},
        ("pp(3)", "layers(2)"),
        also=frozenset({"stages-filled"}),
    ),
    RuleCase("stages-filled", zero2, {"stage_layers": [16, 16]}, ("[16, 16]",)),
    RuleCase("layers-assigned", zero2, {"stage_layers": [31]}, ("31", "layers(32)")),
    RuleCase(
        "shard-degree-divides", zero2, {"shard_degree": 3}, ("shard_degree(3)",), also=frozenset({"shard-whole-group"})
    ),
    RuleCase("unsharded-degree", zero2, {"zero_stage": 0}, ("shard_degree(16)",)),
    RuleCase("offload-named", zero2, {"offload_optimizer": 1.0}, ("none",)),
    RuleCase("recompute-layers", zero2, {"recompute_kind": "full", "recompute_layers": 8}, ("full", "8")),
    RuleCase("learned-positions", pipeline, {"job": make_job(seq_len=4096, precision="fp16")}, ("4096", "2048")),
    RuleCase(
        "no-virtual-stages",
        zero2,
        {"vpp": 2, "stage_layers": [16, 16]},
        ("vpp(2)",),
    ),
    RuleCase("schedule", pipeline, {"schedule": "gpipe"}, ("gpipe", "1f1b")),
    RuleCase("zero-stage", zero2, {"zero_stage": 4}, ("zero_stage(4)",)),
    RuleCase("no-expert-parallel", zero3, {"model": mixtral(layers=80), "ep": 8}, ("ep(8)",)),
    RuleCase("no-sequence-parallel", tensor, {"sequence_parallel": True}, ("tp(8)",)),
    RuleCase("pipeline-zero-stage", pipeline, {"zero_stage": 2}, ("pp(3)", "zero_stage(2)")),
    RuleCase("pipeline-layout", pipeline, {"stage_layers": [13, 14, 13]}, ("[13, 14, 13]", "[14, 13, 13]")),
    RuleCase(
        "pipeline-model",
        pipeline,
        {"model": mamba_hybrid(), "stage_layers": [3, 3, 2]},
        ("pp(3)", "mamba"),
    ),
    RuleCase("context-not-with-pipeline", pipeline, {"cp": 2, "dp": 4}, ("pp(3)", "cp(2)")),
    RuleCase("context-not-with-tensor", tensor, {"cp": 2, "dp": 8}, ("tp(8)", "cp(2)")),
    RuleCase(
        "tensor-not-with-pipeline",
        pipeline,
        {"model": llama8b(), "stage_layers": [11, 11, 10], "tp": 2, "dp": 4, "shard_degree": 4},
        ("tp(2)", "pp(3)"),
    ),
    RuleCase("tensor-zero-stage", tensor, {"zero_stage": 3}, ("tp(8)", "zero_stage(3)")),
    RuleCase(
        "heads-over-tp",
        tensor,
        {"model": llama70b(heads=60, kv_heads=60).model_copy(update={"kv_heads": 8})},
        ("60", "= 4"),
    ),
    RuleCase("kv-heads-over-tp", tensor, {"tp": 16, "dp": 8, "shard_degree": 8}, ("kv_heads(8) % tp(16) = 8",)),
    RuleCase("tensor-parallel-model", tensor, {"model": mixtral(), "stage_layers": [32]}, ("tp(8)", "attention/moe")),
    RuleCase("heads-over-cp", ulysses, {"model": llama70b(heads=60, kv_heads=4)}, ("heads(60) % cp(8) = 4",)),
    RuleCase("kv-heads-over-cp", ulysses, {"model": llama70b(heads=48, kv_heads=12)}, ("kv_heads(12)", "= 4")),
    RuleCase("sequence-over-cp", ulysses, {"job": make_job(seq_len=8196)}, ("seq_len(8196) % cp(8) = 4",)),
    RuleCase(
        "ulysses-attention",
        ulysses,
        {"model": llama70b(window=WindowSpec(size=4096, global_every=0))},
        ("cp(8)", "window"),
    ),
    RuleCase("shard-whole-group", zero3, {"shard_degree": 8}, ("shard_degree(8)", "dp(128)", "128")),
    RuleCase("secondary-shard", zero2, {"secondary_shard_degree": 8}, ("secondary_shard_degree(8)", "zero_stage(2)")),
    RuleCase(
        "offload-needs-zero",
        zero2,
        {"zero_stage": 0, "shard_degree": 1, "offload_optimizer": 1.0, "offload_device": CPU},
        ("zero_stage(0)",),
    ),
    RuleCase("offload-partial", zero2, {"offload_optimizer": 0.5, "offload_device": CPU}, ("0.5", "zero_stage(2)")),
    RuleCase(
        "offload-parameters",
        zero2,
        {"offload_optimizer": 1.0, "offload_device": CPU, "offload_parameters": CPU},
        ("cpu", "zero_stage(2)"),
    ),
    RuleCase("offload-nvme", zero3, {"offload_optimizer": 1.0, "offload_device": NVME}, ("nvme", "None")),
    RuleCase("offload-not-with-pipeline", pipeline, {"offload_optimizer": 1.0, "offload_device": CPU}, ("pp(3)",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_rule_refuses_exactly_what_it_names(case: RuleCase) -> None:
    """The legal strategy passes, the changed one breaks this rule only, and the sentence carries the numbers."""
    check_rule_case(DEEPSPEED, case)


def test_every_rule_has_a_case() -> None:
    """A new rule needs a strategy that breaks it."""
    assert {case.rule for case in CASES} == {rule.id for rule in DEEPSPEED.rules}


def test_usual_strategies_are_legal() -> None:
    """ZeRO with every kind of offload, hpZ, a whole mixture of experts and latent attention break no rule."""
    rich = h100_cluster(128, nvme_bytes_per_s=5e9)
    offloads: list[dict[str, Any]] = [
        {"offload_optimizer": 0.35, "offload_device": CPU},
        {"offload_optimizer": 1.0, "offload_device": CPU, "offload_parameters": CPU},
        {"offload_optimizer": 1.0, "offload_device": NVME, "offload_parameters": NVME},
        {"secondary_shard_degree": 8},
        {"model": mixtral(), "stage_layers": [32]},
        {"model": deepseek_v3(), "stage_layers": [61]},
        {"model": mamba_hybrid(), "stage_layers": [8]},
    ]
    for changes in offloads:
        context = zero3().but(cluster=rich, **changes).context(DEEPSPEED)
        assert [rule.id for rule, mask in DEEPSPEED.broken_rules(context) if mask.any()] == []


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(10, 4, (3, 3, 2, 2)), (32, 4, (8, 8, 8, 8)), (5, 4, (2, 1, 1, 1)), (61, 8, (8, 8, 8, 8, 8, 7, 7, 7))],
)
def test_own_split_puts_larger_stages_first(layers: int, stages: int, expected: tuple[int, ...]) -> None:
    """What DeepSpeed's partition_balanced returns for equal blocks between an embedding and a head."""
    assert balanced(layers, stages) == expected
