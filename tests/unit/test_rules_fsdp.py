"""Every rule of FSDP2: a strategy that keeps all of them, and one that breaks just that rule."""

from __future__ import annotations

from typing import Any

import pytest

from planner.backends import BACKENDS
from planner.specs.batch import DEVICES
from planner.specs.model import WindowSpec
from tests.helpers import (
    RuleCase,
    Situation,
    accelerator,
    b200,
    check_rule_case,
    deepseek_v3,
    delta_net,
    gpt13b,
    h100_cluster,
    llama8b,
    llama70b,
    make_job,
    mixtral,
    v100,
)

FSDP = BACKENDS["fsdp"]
CPU = DEVICES.index("cpu")


def sharded() -> Situation:
    """70B sharded over 128 GPUs."""
    columns = {"dp": 128, "zero_stage": 3, "shard_degree": 128, "stage_layers": [80]}
    return Situation(llama70b(), h100_cluster(128), make_job(), columns)


def hybrid() -> Situation:
    """8B: 8 GPUs of a node hold one copy, 2 nodes replicate it."""
    columns = {"dp": 16, "zero_stage": 2, "shard_degree": 8, "stage_layers": [32]}
    return Situation(llama8b(), h100_cluster(16), make_job(), columns)


def tensor() -> Situation:
    """70B with tp 8 and sequence parallelism."""
    columns = {"tp": 8, "sequence_parallel": True, "dp": 16, "zero_stage": 3, "shard_degree": 16, "stage_layers": [80]}
    return Situation(llama70b(), h100_cluster(128), make_job(), columns)


def context() -> Situation:
    """70B with long sequences over 4 ranks."""
    columns = {"cp": 4, "dp": 32, "zero_stage": 3, "shard_degree": 128, "stage_layers": [80]}
    return Situation(llama70b(), h100_cluster(128), make_job(seq_len=65536), columns)


def learned() -> Situation:
    """13B with a learned position table."""
    columns = {"dp": 16, "zero_stage": 3, "shard_degree": 16, "stage_layers": [40]}
    return Situation(gpt13b(), h100_cluster(16), make_job(seq_len=2048), columns)


def eight_bit() -> Situation:
    return tensor().but(job=make_job(precision="fp8"))


CASES = [
    RuleCase(
        "gpu-vendor", sharded, {"cluster": h100_cluster(128, accelerator=accelerator("t", vendor="aws"))}, ("aws",)
    ),
    RuleCase("loss-implementation", sharded, {"job": make_job(loss="chunked")}, ("chunked",)),
    RuleCase(
        "fp8-dense-only", sharded, {"model": mixtral(layers=80), "job": make_job(precision="fp8")}, ("experts(8)",)
    ),
    RuleCase(
        "fp4-not-offered",
        hybrid,
        {"cluster": h100_cluster(16, accelerator=b200()), "job": make_job(precision="nvfp4")},
        ("nvfp4",),
    ),
    RuleCase(
        "no-pipeline",
        hybrid,
        {"pp": 2, "dp": 8, "shard_degree": 8, "stage_layers": [16, 16]},
        ("pp(2)", "must be 1"),
        also=frozenset({"schedule"}),
    ),
    RuleCase("no-virtual-stages", hybrid, {"vpp": 2, "stage_layers": [16, 16]}, ("vpp(2)", "must be 1")),
    RuleCase("number-format", hybrid, {"cluster": h100_cluster(16, accelerator=v100())}, ("bf16", "v100")),
    RuleCase("world-size", hybrid, {"cluster": h100_cluster(32)}, ("= 16", "gpus(32)")),
    RuleCase("batch-divisible", hybrid, {"micro_batch": 5}, ("micro_batch(5) * dp(16)", "= 32")),
    RuleCase(
        "stages-within-layers",
        hybrid,
        {"model": llama8b(layers=1), "vpp": 2, "stage_layers": [1, 0]},
        ("vpp(2)", "layers(1)"),
        also=frozenset({"stages-filled", "no-virtual-stages"}),
    ),
    RuleCase("stages-filled", hybrid, {"stage_layers": [16, 16]}, ("[16, 16]",)),
    RuleCase("layers-assigned", hybrid, {"stage_layers": [33]}, ("33", "layers(32)")),
    RuleCase("shard-degree-divides", hybrid, {"shard_degree": 5}, ("shard_degree(5)", "= 1")),
    RuleCase("stage-2-needs-shards", hybrid, {"zero_stage": 2, "shard_degree": 1}, ("shard_degree(1)",)),
    RuleCase("unsharded-degree", hybrid, {"zero_stage": 0}, ("shard_degree(8)",)),
    RuleCase(
        "offload-named",
        hybrid,
        {"offload_device": CPU},
        ("share(0)", "cpu"),
    ),
    RuleCase("recompute-layers", hybrid, {"recompute_kind": "full", "recompute_layers": 0}, ("full", "at least 1")),
    RuleCase("learned-positions", learned, {"job": make_job(seq_len=4096)}, ("4096", "2048")),
    RuleCase("schedule", hybrid, {"schedule": "1f1b"}, ("1f1b", "pp(1)")),
    RuleCase("zero-stage", sharded, {"zero_stage": 1}, ("zero_stage(1)", "0, 2, 3")),
    RuleCase("no-expert-parallel", sharded, {"model": mixtral(layers=80), "ep": 4}, ("ep(4)",)),
    RuleCase("no-secondary-shard", sharded, {"secondary_shard_degree": 8}, ("8",)),
    RuleCase("heads-over-tp", tensor, {"model": llama70b().model_copy(update={"heads": 60})}, ("60", "= 4")),
    RuleCase("kv-heads-over-tp", tensor, {"tp": 16, "dp": 8, "shard_degree": 8}, ("kv_heads(8) % tp(16) = 8",)),
    RuleCase("vocab-over-tp", tensor, {"model": llama70b(vocab=50257)}, ("vocab(50257) % tp(8) = 1",)),
    RuleCase(
        "tensor-parallel-model",
        tensor,
        {"model": mixtral(), "stage_layers": [32]},
        ("tp(8)", "attention/moe"),
    ),
    RuleCase("sequence-parallel-needs-tp", sharded, {"sequence_parallel": True}, ("tp(1)",)),
    RuleCase("sequence-parallel-sequence", tensor, {"job": make_job(seq_len=8196)}, ("8196", "tp(8)", "= 4")),
    RuleCase("context-parallel-sequence", context, {"job": make_job(seq_len=8196)}, ("(2 * cp(4)) = 4",)),
    RuleCase(
        "context-parallel-attention",
        context,
        {"model": llama70b(window=WindowSpec(size=1024, global_every=6))},
        ("cp(4)", "window"),
    ),
    RuleCase("shard-covers-context", context, {"shard_degree": 2}, ("shard_degree(2) % cp(4) = 2",)),
    RuleCase(
        "offload-all-or-nothing",
        sharded,
        {"offload_optimizer": 0.5, "offload_device": CPU, "offload_parameters": CPU},
        ("0.5", "cpu"),
    ),
    RuleCase(
        "offload-needs-sharding",
        hybrid,
        {
            "zero_stage": 0,
            "shard_degree": 1,
            "offload_optimizer": 1.0,
            "offload_device": CPU,
            "offload_parameters": CPU,
        },
        ("zero_stage(0)",),
    ),
    RuleCase("fp8-alignment", eight_bit, {"model": llama70b(ffn=28680)}, ("ffn(28680) % (16 * tp(8)) = 8",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_rule_refuses_exactly_what_it_names(case: RuleCase) -> None:
    """The legal strategy passes, the changed one breaks this rule only, and the sentence carries the numbers."""
    check_rule_case(FSDP, case)


def test_every_rule_has_a_case() -> None:
    """A new rule needs a strategy that breaks it."""
    assert {case.rule for case in CASES} == {rule.id for rule in FSDP.rules}


def test_usual_strategies_are_legal() -> None:
    """Plain sharding takes any mixer, with offload or without; replication is stage 0."""
    changes: list[dict[str, Any]] = [
        {"model": deepseek_v3(), "stage_layers": [61]},
        {"model": delta_net(), "stage_layers": [8]},
        {"offload_optimizer": 1.0, "offload_device": CPU, "offload_parameters": CPU},
        {"zero_stage": 0, "shard_degree": 1},
    ]
    for change in changes:
        assert [r.id for r, mask in FSDP.broken_rules(sharded().but(**change).context(FSDP)) if mask.any()] == []
