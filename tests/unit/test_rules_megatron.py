"""Every rule of Megatron-LM: a strategy that keeps all of them, and one that breaks just that rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.backends import BACKENDS
from planner.specs.batch import DEVICES
from planner.specs.model import BiasSpec, WindowSpec
from tests.helpers import (
    RuleCase,
    Situation,
    accelerator,
    check_rule_case,
    deepseek_v3,
    gpt13b,
    h100_cluster,
    llama70b,
    make_job,
    mamba_hybrid,
    mixtral,
    v100,
)

MEGATRON = BACKENDS["megatron"]
CPU, NVME = DEVICES.index("cpu"), DEVICES.index("nvme")


def dense() -> Situation:
    """70B on 128 GPUs: tp 8, pp 4 interleaved five times, dp 4, distributed optimizer."""
    columns = {
        "tp": 8,
        "sequence_parallel": True,
        "pp": 4,
        "vpp": 5,
        "schedule": "interleaved",
        "dp": 4,
        "zero_stage": 1,
        "shard_degree": 4,
        "stage_layers": [4] * 20,
    }
    return Situation(llama70b(), h100_cluster(128), make_job(), columns)


def flat() -> Situation:
    """70B on 128 GPUs without a pipeline."""
    columns = {
        "tp": 8,
        "sequence_parallel": True,
        "dp": 16,
        "zero_stage": 1,
        "shard_degree": 16,
        "stage_layers": [80],
    }
    return Situation(llama70b(), h100_cluster(128), make_job(), columns)


def experts() -> Situation:
    """DeepSeek-V3 on 512 GPUs: tp 2, pp 4, ep 32, etp 1."""
    columns = {
        "tp": 2,
        "sequence_parallel": True,
        "pp": 4,
        "schedule": "1f1b",
        "ep": 32,
        "dp": 64,
        "zero_stage": 1,
        "shard_degree": 64,
        "stage_layers": [16, 15, 15, 15],
    }
    return Situation(deepseek_v3(), h100_cluster(512), make_job(global_batch=2048), columns)


def few_experts() -> Situation:
    """Mixtral on 64 GPUs: tp 4, ep 8, etp 1."""
    columns = {
        "tp": 4,
        "sequence_parallel": True,
        "ep": 8,
        "dp": 16,
        "zero_stage": 1,
        "shard_degree": 16,
        "stage_layers": [32],
    }
    return Situation(mixtral(), h100_cluster(64), make_job(), columns)


def old() -> Situation:
    """GPT-3 13B in fp16 on Volta."""
    columns = {"tp": 8, "sequence_parallel": True, "dp": 2, "zero_stage": 1, "shard_degree": 2, "stage_layers": [40]}
    cluster = h100_cluster(16, accelerator=v100())
    return Situation(gpt13b(), cluster, make_job(seq_len=2048, precision="fp16"), columns)


def old_experts() -> Situation:
    """Mixtral in fp16 on Ampere."""
    return few_experts().but(job=make_job(precision="fp16"), cluster=h100_cluster(64))


def eight_bit() -> Situation:
    return flat().but(job=make_job(precision="fp8"))


CASES = [
    RuleCase(
        "gpu-vendor", flat, {"cluster": h100_cluster(128, accelerator=accelerator("tpu", vendor="google"))}, ("google",)
    ),
    RuleCase("attention-blocks-only", flat, {"model": mamba_hybrid(), "stage_layers": [8]}, ("M-M-*-M-",)),
    RuleCase("position-encoding", flat, {"model": llama70b(position="alibi")}, ("alibi",)),
    RuleCase("parallel-block", flat, {"model": llama70b(parallel_block=True, norms_per_layer=1)}, ("llama-70b",)),
    RuleCase("norms-per-layer", flat, {"model": llama70b(norms_per_layer=4)}, ("norms_per_layer(4)", "2")),
    RuleCase("norm-kind", flat, {"model": llama70b(norm="layernorm_np")}, ("layernorm_np",)),
    RuleCase("query-key-norm", flat, {"model": llama70b(qk_norm="full")}, ("full",)),
    RuleCase("bias-layout", flat, {"model": llama70b(bias=BiasSpec(mlp=True))}, ("mlp(True)", "qkv(False)")),
    RuleCase("embedding-layout", flat, {"model": llama70b(embedding_width=512)}, ("512",)),
    RuleCase("activation", flat, {"model": llama70b(activation="gelu")}, ("gelu", "gated_mlp(True)")),
    RuleCase("final-norm", flat, {"model": llama70b(final_norm=False)}, ("final_norm",)),
    RuleCase("mtp-position", old, {"model": gpt13b(mtp_layers=1)}, ("mtp_layers(1)", "learned")),
    RuleCase("loss-implementation", flat, {"job": make_job(loss="chunked")}, ("chunked",)),
    RuleCase("grouped-gemm", old_experts, {"cluster": h100_cluster(64, accelerator=v100())}, ("Volta", "8.0")),
    RuleCase("number-format", old, {"job": make_job(seq_len=2048)}, ("bf16", "v100")),
    RuleCase("world-size", dense, {"cluster": h100_cluster(256)}, ("tp(8) * pp(4) * cp(1) * dp(4)", "128", "256")),
    RuleCase("batch-divisible", flat, {"job": make_job(global_batch=514)}, ("514", "dp(16)", "= 2")),
    RuleCase(
        "stages-within-layers",
        dense,
        {"vpp": 21, "stage_layers": [1] * 80 + [0] * 4},
        ("pp(4) * vpp(21)", "80"),
        also=frozenset({"stages-filled", "interleaved-chunks"}),
    ),
    RuleCase(
        "stages-filled",
        dense,
        {"stage_layers": [8, 0] + [4] * 18},
        ("[8, 0, 4", "pp(4) * vpp(5)"),
        also=frozenset({"interleaved-chunks"}),
    ),
    RuleCase("layers-assigned", dense, {"stage_layers": [4] * 19 + [3]}, ("79", "layers(80)")),
    RuleCase("shard-degree-divides", flat, {"shard_degree": 3}, ("dp(16) * cp(1)", "shard_degree(3)", "= 1")),
    RuleCase("unsharded-degree", flat, {"zero_stage": 0}, ("shard_degree(16)",)),
    RuleCase("offload-named", flat, {"offload_optimizer": 0.5}, ("0.5", "none")),
    RuleCase("recompute-layers", flat, {"recompute_kind": "mlp", "recompute_layers": 40}, ("mlp", "40")),
    RuleCase("learned-positions", old, {"job": make_job(seq_len=4096, precision="fp16")}, ("4096", "2048")),
    RuleCase("schedule", dense, {"schedule": "1f1b"}, ("1f1b", "pp(4)", "vpp(5)", "interleaved")),
    RuleCase("zero-stage", flat, {"zero_stage": 2}, ("zero_stage(2)", "0, 1")),
    RuleCase(
        "heads-over-tp",
        flat,
        {"model": llama70b(heads=60, kv_heads=4)},
        ("heads(60) % tp(8) = 4, must be 0",),
    ),
    RuleCase(
        "kv-heads-over-tp",
        flat,
        {"model": llama70b(heads=48, kv_heads=12)},
        ("kv_heads(12) % tp(8) = 4", "tp(8) % kv_heads(12) = 8"),
    ),
    RuleCase("hidden-over-tp", flat, {"model": llama70b(hidden=8196)}, ("hidden(8196) % tp(8) = 4",)),
    RuleCase("ffn-over-tp", flat, {"model": llama70b(ffn=28674)}, ("ffn(28674) % tp(8) = 2",)),
    RuleCase("expert-parallel-needs-experts", flat, {"ep": 2}, ("ep(2) * etp(1)", "2")),
    RuleCase(
        "experts-over-ep",
        experts,
        {"cluster": h100_cluster(384), "dp": 48, "shard_degree": 48, "ep": 48, "job": make_job(global_batch=1920)},
        ("experts(256) % ep(48) = 16",),
    ),
    RuleCase("expert-world-size", few_experts, {"etp": 16}, ("gpus(64) % (etp(16) * ep(8) * pp(1)) = 64",)),
    RuleCase("expert-optimizer-instances", few_experts, {"shard_degree": 1}, ("data parallel(8)", "instances(16)")),
    RuleCase(
        "expert-ffn-over-etp",
        experts,
        {"cluster": h100_cluster(384), "dp": 48, "shard_degree": 48, "etp": 3, "job": make_job(global_batch=1920)},
        ("expert_ffn(2048) % etp(3) = 2",),
    ),
    RuleCase(
        "shared-ffn-over-tp",
        experts,
        {"model": deepseek_v3().model_copy(update={"moe": deepseek_v3().moe.model_copy(update={"shared_ffn": 2049})})},  # type: ignore[union-attr]
        ("shared_ffn(2049) % tp(2) = 1",),
    ),
    RuleCase(
        "moe-bias-needs-etp-1",
        few_experts,
        {"model": mixtral(bias=BiasSpec(qkv=True, out=True, mlp=True)), "etp": 2, "ep": 4},
        ("etp(2)",),
    ),
    RuleCase("moe-needs-sequence-parallel", few_experts, {"sequence_parallel": False}, ("experts(8)", "tp(4)")),
    RuleCase("sequence-parallel-needs-tp", flat, {"tp": 1, "dp": 128, "shard_degree": 128}, ("tp(1)",)),
    RuleCase(
        "sequence-parallel-sequence", flat, {"job": make_job(seq_len=8196)}, ("seq_len(8196)", "cp(1) * tp(8)", "= 4")
    ),
    RuleCase(
        "context-parallel-sequence",
        flat,
        {"sequence_parallel": False, "job": make_job(seq_len=8190), "cp": 4, "dp": 4},
        ("seq_len(8190) % (2 * cp(4)) = 6",),
    ),
    RuleCase("context-parallel-flash", flat, {"job": make_job(flash_attention=False), "cp": 2, "dp": 8}, ("cp(2)",)),
    RuleCase(
        "context-parallel-masks",
        flat,
        {"model": llama70b(window=WindowSpec(size=4096, global_every=2)), "cp": 2, "dp": 8},
        ("cp(2)",),
    ),
    RuleCase("virtual-stages-need-pipeline", flat, {"vpp": 2, "stage_layers": [40, 40]}, ("vpp(2)", "pp(1)")),
    RuleCase(
        "interleaved-chunks",
        dense,
        {"vpp": 3, "stage_layers": [6, 7, 7, 7, 7, 7, 7, 7, 7, 6, 6, 6]},
        ("pp(4) * vpp(3)", "leave 4 places", "at most 3"),
    ),
    RuleCase("interleaved-micro-batches", dense, {"job": make_job(global_batch=24)}, ("micro_batches(6) % pp(4) = 2",)),
    RuleCase(
        "offload-needs-distributed-optimizer",
        flat,
        {"zero_stage": 0, "shard_degree": 1, "offload_optimizer": 0.5, "offload_device": CPU},
        ("0.5", "zero_stage(0)"),
    ),
    RuleCase("offload-precision", old, {"offload_optimizer": 1.0, "offload_device": CPU}, ("fp16",)),
    RuleCase("offload-device", flat, {"offload_optimizer": 1.0, "offload_device": NVME}, ("nvme",)),
    RuleCase(
        "fp8-alignment", eight_bit, {"model": llama70b(ffn=28680)}, ("ffn(28680) % (16 * tp(8)) = 8", "must be 0")
    ),
    RuleCase("no-secondary-shard", flat, {"secondary_shard_degree": 8}, ("secondary_shard_degree(8)",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_rule_refuses_exactly_what_it_names(case: RuleCase) -> None:
    """The legal strategy passes, the changed one breaks this rule only, and the sentence carries the numbers."""
    check_rule_case(MEGATRON, case)


def test_every_rule_has_a_case() -> None:
    """A new rule needs a strategy that breaks it."""
    assert {case.rule for case in CASES} == {rule.id for rule in MEGATRON.rules}


@pytest.mark.parametrize("situation", [dense, flat, experts, few_experts, old, eight_bit])
def test_usual_strategies_are_legal(situation: Callable[[], Situation]) -> None:
    """Layouts that are run in practice break no rule."""
    context = situation().context(MEGATRON)
    assert [rule.id for rule, mask in MEGATRON.broken_rules(context) if mask.any()] == []


def test_key_value_heads_may_be_fewer_than_tp() -> None:
    """Eight key/value heads on sixteen ranks are shared by two ranks each, which Megatron accepts."""
    context = flat().but(tp=16, dp=8, shard_degree=8).context(MEGATRON)
    assert not any(mask.any() for _, mask in MEGATRON.broken_rules(context))


def test_allowed_values_are_those_that_the_rule_accepts() -> None:
    """The list names divisors of the heads among the divisors of the GPUs."""
    context = flat().but(model=llama70b(heads=60, kv_heads=4)).context(MEGATRON)
    rule = next(rule for rule in MEGATRON.rules if rule.id == "heads-over-tp")
    assert rule.allowed is not None
    assert rule.allowed(context, 0) == "tp in 1, 2, 4"
