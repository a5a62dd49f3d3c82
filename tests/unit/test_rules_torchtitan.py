"""Every rule of torchtitan: a strategy that keeps all of them, and one that breaks just that rule; which models it
builds."""

from __future__ import annotations

from typing import Any

import pytest

from planner.backends import BACKENDS
from planner.backends.torchtitan_rules import model_module
from planner.catalog import load_model
from planner.cost.constants import published_constants
from planner.specs.batch import DEVICES
from planner.specs.model import ModelSpec, MoeSpec, WindowSpec
from tests.helpers import (
    RuleCase,
    Situation,
    accelerator,
    b200,
    broken,
    check_rule_case,
    deepseek_v3,
    gpt13b,
    h100_cluster,
    llama8b,
    llama70b,
    make_job,
    mixtral,
    v100,
)
from tests.strategies import estimated, machines, question

TITAN = BACKENDS["torchtitan"]
CPU = DEVICES.index("cpu")


def sharded() -> Situation:
    """70B sharded over 128 GPUs."""
    columns = {"dp": 128, "zero_stage": 3, "shard_degree": 128, "stage_layers": [80]}
    return Situation(llama70b(), h100_cluster(128), make_job(), columns)


def hybrid() -> Situation:
    """8B: 8 GPUs of a node hold one copy, 2 nodes replicate it; weights stay gathered."""
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


def pipeline() -> Situation:
    """70B in four stages, 16 micro-batches each."""
    columns = {"pp": 4, "schedule": "1f1b", "dp": 32, "zero_stage": 3, "shard_degree": 32, "stage_layers": [20] * 4}
    return Situation(llama70b(), h100_cluster(128), make_job(), columns)


def chunks() -> Situation:
    """The same with two chunks a rank."""
    return pipeline().but(vpp=2, schedule="interleaved", stage_layers=[10] * 8)


def experts() -> Situation:
    """A mixture of 64 experts over 8 ranks."""
    columns = {"dp": 64, "ep": 8, "zero_stage": 3, "shard_degree": 64, "stage_layers": [32]}
    model = mixtral(moe=MoeSpec(experts=64, top_k=2, expert_ffn=1408))
    return Situation(model, h100_cluster(64), make_job(), columns)


def latent() -> Situation:
    """DeepSeek-V3 with its prediction block."""
    columns = {"dp": 256, "ep": 64, "zero_stage": 3, "shard_degree": 256, "stage_layers": [61]}
    return Situation(deepseek_v3(), h100_cluster(256), make_job(seq_len=4096, loss="eager"), columns)


def eight_bit() -> Situation:
    return tensor().but(job=make_job(precision="fp8"))


CASES = [
    RuleCase(
        "gpu-vendor", sharded, {"cluster": h100_cluster(128, accelerator=accelerator("t", vendor="aws"))}, ("aws",)
    ),
    RuleCase("model-family", sharded, {"model": llama70b(window=WindowSpec(size=4096, global_every=6))}, ("window",)),
    RuleCase("flex-attention", sharded, {"job": make_job(flash_attention=False)}, ("False",)),
    RuleCase("precision-offered", sharded, {"job": make_job(precision="fp16")}, ("fp16",)),
    RuleCase("experts-in-bf16", experts, {"job": make_job(precision="fp32")}, ("fp32", "experts(64)")),
    RuleCase("fp8-dense-only", experts, {"job": make_job(precision="fp8")}, ("experts(64)",)),
    RuleCase("no-adapters", sharded, {"job": make_job(task="lora")}, ("lora",)),
    RuleCase("loss-implementation", sharded, {"job": make_job(loss="fused")}, ("fused",)),
    RuleCase("prediction-loss", latent, {"job": make_job(seq_len=4096, loss="chunked")}, ("chunked", "mtp_layers(1)")),
    RuleCase("number-format", hybrid, {"cluster": h100_cluster(16, accelerator=v100())}, ("bf16", "v100")),
    RuleCase("world-size", hybrid, {"cluster": h100_cluster(32)}, ("= 16", "gpus(32)")),
    RuleCase("batch-divisible", hybrid, {"micro_batch": 5}, ("micro_batch(5) * dp(16)", "= 32")),
    RuleCase(
        "stages-within-layers",
        pipeline,
        {"model": llama70b(layers=3), "stage_layers": [1, 1, 1, 0]},
        ("pp(4)", "layers(3)"),
        also=frozenset({"stages-filled"}),
    ),
    RuleCase("stages-filled", hybrid, {"stage_layers": [16, 16]}, ("[16, 16]",)),
    RuleCase("layers-assigned", hybrid, {"stage_layers": [33]}, ("33", "layers(32)")),
    RuleCase("shard-degree-divides", hybrid, {"shard_degree": 5}, ("shard_degree(5)", "= 1")),
    RuleCase("unsharded-degree", hybrid, {"zero_stage": 0}, ("shard_degree(8)",)),
    RuleCase("offload-named", hybrid, {"offload_device": CPU}, ("share(0)", "cpu")),
    RuleCase("recompute-layers", hybrid, {"recompute_kind": "full", "recompute_layers": 4}, ("full", "every layer")),
    RuleCase(
        "learned-positions",
        hybrid,
        {"model": gpt13b(layers=32, tied=False), "job": make_job(seq_len=4096)},
        ("4096", "2048"),
        also=frozenset({"model-family"}),
    ),
    RuleCase("prediction-blocks", latent, {"cp": 2, "dp": 128}, ("mtp_layers(1)", "cp(2)")),
    RuleCase("tied-embedding-pipeline", pipeline, {"model": llama70b(tied=True)}, ("pp(4)",)),
    RuleCase("schedule", pipeline, {"schedule": "zb-h1"}, ("zb-h1", "pp(4)")),
    RuleCase("pipeline-filled", pipeline, {"job": make_job(global_batch=96)}, ("micro-batches(3)", "pp(4)")),
    RuleCase("interleaved-rounds", chunks, {"job": make_job(global_batch=9 * 32)}, ("micro-batches(9)", "rounds(2)")),
    RuleCase("zero-stage", sharded, {"zero_stage": 1}, ("zero_stage(1)", "0, 2, 3")),
    RuleCase("pipeline-sharding", pipeline, {"zero_stage": 2}, ("zero_stage(2)", "pp(4)")),
    RuleCase("stage-2-needs-shards", hybrid, {"shard_degree": 1}, ("shard_degree(1)",)),
    RuleCase("no-secondary-shard", sharded, {"secondary_shard_degree": 8}, ("8",)),
    RuleCase("heads-over-tp", tensor, {"model": llama70b().model_copy(update={"heads": 60})}, ("60", "= 4")),
    RuleCase("kv-heads-over-tp", tensor, {"tp": 16, "dp": 8, "shard_degree": 8}, ("kv_heads(8) % tp(16) = 8",)),
    RuleCase("sequence-parallel-needs-tp", sharded, {"sequence_parallel": True}, ("tp(1)",)),
    RuleCase("sequence-divides", context, {"job": make_job(seq_len=8 * 4 * 255 + 4, loss="eager")}, ("cp(4)", "= 4")),
    RuleCase("loss-in-chunks", sharded, {"job": make_job(seq_len=8196)}, ("seq_len(8196)", "= 4")),
    RuleCase("shard-covers-context", context, {"shard_degree": 2}, ("shard_degree(2) % cp(4) = 2",)),
    RuleCase(
        "experts-over-ep", experts, {"model": mixtral(moe=MoeSpec(experts=60, top_k=2, expert_ffn=1408))}, ("60", "= 4")
    ),
    RuleCase(
        "expert-tensor-ranks",
        experts,
        {"tp": 2, "dp": 32, "shard_degree": 32, "ep": 1, "sequence_parallel": True},
        ("etp(1)", "must be 2"),
    ),
    RuleCase("expert-ranks", experts, {"shard_degree": 4}, ("(shard_degree(4) * tp(1)) % ep(8) = 4",)),
    RuleCase(
        "unsharded-experts",
        experts,
        {"tp": 8, "dp": 8, "shard_degree": 1, "zero_stage": 0, "ep": 4, "sequence_parallel": True},
        ("zero_stage(0)", "ep(4)", "tp(8)"),
    ),
    RuleCase(
        "expert-rows",
        experts,
        {"model": mixtral(moe=MoeSpec(experts=32, top_k=2, expert_ffn=1412))},
        ("expert_ffn(1412)", "8 shards"),
    ),
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
    check_rule_case(TITAN, case)


def test_every_rule_has_a_case() -> None:
    """A new rule needs a strategy that breaks it."""
    assert {case.rule for case in CASES} == {rule.id for rule in TITAN.rules}


def test_usual_strategies_are_legal() -> None:
    """Replication, offload, pipelines with chunks, experts over data and over tensor ranks."""
    offload = {"offload_optimizer": 1.0, "offload_device": CPU, "offload_parameters": CPU}
    split = {"tp": 4, "dp": 16, "shard_degree": 16, "sequence_parallel": True}
    situations: list[tuple[Situation, dict[str, Any]]] = [
        (sharded(), offload),
        (sharded(), {"zero_stage": 0, "shard_degree": 1}),
        (chunks(), {}),
        (experts(), split),
        (experts(), split | {"ep": 1, "etp": 4}),
        (experts(), split | {"ep": 4, "zero_stage": 0, "shard_degree": 1}),
        (latent(), {}),
        (latent(), {"job": make_job(seq_len=4096)}),
        (latent(), {"model": deepseek_v3(mtp_layers=0), "job": make_job(seq_len=4096)}),
    ]
    for situation, change in situations:
        assert broken(TITAN, situation.but(**change).context(TITAN)) == set(), change


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("llama-3-8b", "llama3"),
        ("llama-3.2-1b", "llama3"),
        ("mistral-nemo-12b", "llama3"),
        ("qwen3-8b", "qwen3"),
        ("qwen3-30b-a3b", "qwen3"),
        ("mixtral-8x7b", "qwen3"),
        ("deepseek-v2-lite", "deepseek_v3"),
        ("deepseek-v3", "deepseek_v3"),
        ("qwen2.5-7b", None),
        ("gpt3-175b", None),
        ("gpt-oss-20b", None),
        ("gemma-2-9b", None),
        ("nemotron-h-8b", None),
        ("qwen3-next-80b-a3b", None),
        ("llama-4-scout", None),
    ],
)
def test_models_that_torchtitan_builds(name: str, module: str | None) -> None:
    """Biases, windows, sinks, other norms, activations and mixers are outside its three families here."""
    assert model_module(load_model(name).spec) == module


def test_shared_experts_are_counted_whole() -> None:
    """The latent family builds whole shared experts; a width between two of them cannot be built."""
    moe = MoeSpec(experts=64, top_k=6, expert_ffn=1408, shared_ffn=2000)
    assert model_module(deepseek_v3(moe=moe)) is None
    assert model_module(deepseek_v3(moe=moe.model_copy(update={"shared_ffn": 2816}))) == "deepseek_v3"


def test_mistral_window_is_refused() -> None:
    """A sliding window has no place in the llama3 family."""
    plain: ModelSpec = llama8b()
    assert model_module(plain) == "llama3"
    assert model_module(plain.model_copy(update={"window": WindowSpec(size=4096, global_every=0)})) is None


def test_float8_is_priced_as_measured_rowwise_runs() -> None:
    """The recipe of version 0.3 is the one behind the fitted constant."""
    shares = published_constants().values["gemm_share_fp8"]
    assert shares["torchtitan"] == shares["torchtitan-rowwise"]


def test_plans_hold_logits_in_chunks() -> None:
    """An eighth of 12 bytes a logit, unless the job wants the loss at once."""
    assert TITAN.habits.loss_bytes_per_logit(make_job()) == pytest.approx(1.5)
    assert TITAN.habits.loss_bytes_per_logit(make_job(loss="eager")) == pytest.approx(12)


def test_prediction_blocks_hold_all_logits() -> None:
    """The loss of DeepSeek-V3's prediction block needs at least the memory of the eager one, whatever it is called."""
    peaks = [
        estimated(
            question("deepseek-v3", machines("h200", 512), "torchtitan", seq_len=4096, global_batch=512, loss=loss),
            zero_stage=3,
            ep=64,
            recompute="full",
        ).peak_memory_bytes
        for loss in ("auto", "eager")
    ]
    assert peaks[1] <= peaks[0] <= 1.05 * peaks[1]


def test_pipelines_run_on_blackwell_in_bf16() -> None:
    """Nothing in the rules ties plans to one generation of accelerators."""
    cluster = h100_cluster(128, accelerator=b200())
    assert broken(TITAN, pipeline().but(cluster=cluster).context(TITAN)) == set()
