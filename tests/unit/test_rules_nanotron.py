"""Every rule of nanotron: a strategy that keeps all of them, and one that breaks just that rule; how it splits layers.

The checks behind the rules stand in nanotron's own source, named by each rule; here they are restated with numbers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.backends import BACKENDS
from planner.backends.nanotron import Nanotron
from planner.backends.nanotron_rules import layers_by_cost
from planner.cost.attention import attention_s
from planner.cost.context import Work
from planner.specs.batch import DEVICES
from planner.specs.model import BiasSpec, ModelSpec, WindowSpec
from tests.helpers import (
    RuleCase,
    Situation,
    accelerator,
    broken,
    check_rule_case,
    gpt13b,
    h100_cluster,
    llama8b,
    llama70b,
    make_batch,
    make_job,
    mixtral,
    v100,
)
from tests.strategies import machines, question, strategy

NANOTRON = BACKENDS["nanotron"]
CPU = DEVICES.index("cpu")


def grid() -> Situation:
    """70B with tensor parallelism in the node, four stages and sharded optimizer states."""
    columns = {"tp": 8, "sequence_parallel": True, "pp": 4, "schedule": "1f1b", "stage_layers": [21, 20, 20, 19]}
    return Situation(
        llama70b(), h100_cluster(128), make_job(), {**columns, "dp": 4, "zero_stage": 1, "shard_degree": 4}
    )


def flat() -> Situation:
    """8B without stages."""
    columns = {"tp": 2, "dp": 8, "zero_stage": 1, "shard_degree": 8, "stage_layers": [32]}
    return Situation(llama8b(), h100_cluster(16), make_job(), columns)


def context() -> Situation:
    """8B with long sequences over four ranks."""
    columns = {"cp": 4, "dp": 4, "zero_stage": 1, "shard_degree": 4, "stage_layers": [32]}
    return Situation(llama8b(), h100_cluster(16), make_job(seq_len=65536), columns)


def node() -> Situation:
    """8B with tensor parallelism over a node."""
    return flat().but(tp=8, dp=2, shard_degree=2)


def with_heads(heads: int, kv_heads: int) -> ModelSpec:
    return llama8b(heads=heads, kv_heads=kv_heads, hidden=heads * 128)


def biased() -> ModelSpec:
    return llama8b(bias=BiasSpec(qkv=True))


SPLIT = frozenset({"pipeline-layout"})
"""Layers that are not those of nanotron's own split break this, too."""

CASES = [
    RuleCase("gpu-vendor", flat, {"cluster": h100_cluster(16, accelerator=accelerator("t", vendor="aws"))}, ("aws",)),
    RuleCase("number-format", flat, {"cluster": h100_cluster(16, accelerator=v100())}, ("bf16",)),
    RuleCase("precision-bf16", flat, {"job": make_job(precision="fp16")}, ("fp16",)),
    RuleCase("flash-attention-only", flat, {"job": make_job(flash_attention=False)}, ("False",)),
    RuleCase("loss-implementation", flat, {"job": make_job(loss="fused")}, ("fused",)),
    RuleCase("full-training-only", flat, {"job": make_job(task="lora")}, ("lora",)),
    RuleCase("world-size", flat, {"dp": 4, "shard_degree": 4}, ("tp(2) * pp(1) * cp(1) * dp(4)", "gpus(16)")),
    RuleCase("batch-divisible", flat, {"job": make_job(global_batch=12)}, ("12",)),
    RuleCase("zero-stage", flat, {"zero_stage": 3}, ("zero_stage(3)", "0, 1")),
    RuleCase("shard-over-replicas", flat, {"shard_degree": 4}, ("shard_degree(4)", "dp(8)")),
    RuleCase("unsharded-degree", flat, {"zero_stage": 0}, ("shard_degree(8)",)),
    RuleCase("no-secondary-shard", flat, {"secondary_shard_degree": 8}, ("8",)),
    RuleCase("no-offload", flat, {"offload_optimizer": 1.0, "offload_device": CPU}, ("share(1)",)),
    RuleCase("pipeline-layout", grid, {"stage_layers": [20, 20, 20, 20]}, ("[20, 20, 20, 20]", "[21, 20, 20, 19]")),
    RuleCase("no-expert-parallel", flat, {"ep": 2}, ("(ep(2) * etp(1)) = 2",)),
    RuleCase(
        "heads-over-tp",
        node,
        {"model": with_heads(36, 36)},
        ("heads(36) % tp(8) = 4",),
        frozenset({"kv-heads-over-tp"}),
    ),
    RuleCase(
        "kv-heads-cover-tp",
        flat,
        {"tp": 16, "dp": 1, "shard_degree": 1},
        ("tp(16) <= kv_heads(8)",),
        frozenset({"kv-heads-over-tp"}),
    ),
    RuleCase("kv-heads-over-tp", node, {"model": with_heads(24, 12)}, ("kv_heads(12) % tp(8) = 4",)),
    RuleCase("ffn-over-tp", flat, {"model": llama8b(ffn=14337)}, ("ffn(14337) % tp(2) = 1",)),
    RuleCase("sequence-parallel-needs-tp", context, {"sequence_parallel": True}, ("tp(1)",)),
    RuleCase(
        "sequence-parallel-sequence",
        lambda: flat().but(sequence_parallel=True),
        {"job": make_job(seq_len=4095)},
        ("seq_len(4095) % (cp(1) * tp(2)) = 1",),
    ),
    RuleCase(
        "context-parallel-sequence", context, {"job": make_job(seq_len=4100)}, ("seq_len(4100) % (2 * cp(4)) = 4",)
    ),
    RuleCase(
        "context-parallel-replicas",
        lambda: context().but(cp=16, dp=1, zero_stage=0, shard_degree=1),
        {"zero_stage": 1},
        ("cp(16)", "dp(1)", "zero_stage(1)"),
    ),
    RuleCase(
        "qwen2-without-pipeline",
        grid,
        {"model": biased().model_copy(update={"layers": 80})},
        ("pp(4)", "(true)", "must be 1"),
        SPLIT,
    ),
    RuleCase(
        "micro-batches-fill-pipeline", grid, {"job": make_job(global_batch=8)}, ("micro-batches(2) >= pp(4) - 1",)
    ),
    RuleCase("schedule", grid, {"schedule": "none"}, ("schedule(none)", "1f1b, gpipe")),
    RuleCase("layers-assigned", grid, {"stage_layers": [20, 20, 20, 19]}, ("79", "layers(80)"), SPLIT),
    RuleCase("stages-filled", grid, {"stage_layers": [40, 20, 20, 0]}, ("[40, 20, 20, 0]",), SPLIT),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_rule(case: RuleCase) -> None:
    """The legal plan keeps every rule; the change breaks this one."""
    check_rule_case(NANOTRON, case)


def test_virtual_stages_break_two_rules() -> None:
    """No engine interleaves, and no schedule is named for it."""
    two_each = grid().but(vpp=2, schedule="interleaved", stage_layers=[10] * 8)
    assert broken(NANOTRON, two_each.context(NANOTRON)) == {"no-virtual-stages", "schedule"}


MODELS = {
    "moe": (mixtral(), "attention/moe"),
    "learned-positions": (gpt13b(), "position learned"),
    "window": (llama8b(window=WindowSpec(size=4096, global_every=0)), "window/dense"),
    "wide-heads": (llama8b(head_dim=256), "head_dim(256) * heads(32)"),
    "qk-norm": (llama8b(qk_norm="per_head"), "qk_norm per_head"),
    "mlp-bias": (llama8b(bias=BiasSpec(mlp=True)), "biases"),
    "two-matrices": (llama8b(gated_mlp=False), "without a gate"),
    "prediction-block": (llama8b(mtp_layers=1), "prediction"),
    "layernorm": (llama8b(norm="layernorm"), "norm layernorm"),
    "parallel-block": (llama8b(parallel_block=True), "parallel blocks"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_no_class_builds(name: str) -> None:
    """The rule names what the model has, and models that a class builds pass."""
    model, says = MODELS[name]
    case = flat().but(model=model, job=make_job(seq_len=2048), stage_layers=[model.layers]).context(NANOTRON)
    assert "model-class" in broken(NANOTRON, case)
    rule = next(rule for rule in NANOTRON.rules if rule.id == "model-class")
    assert says in rule.equation(case, 0)


def test_biases_of_query_key_and_value_are_legal_without_stages() -> None:
    """They need the Qwen2 model, which trains without a pipeline."""
    assert broken(NANOTRON, flat().but(model=biased()).context(NANOTRON)) == set()


def test_every_rule_has_a_case() -> None:
    """A rule nobody breaks in a test may never refuse anything."""
    tested = {case.rule for case in CASES} | {"model-class", "no-virtual-stages"}
    arithmetic = {"stages-within-layers", "shard-degree-divides", "offload-named", "recompute-layers"}
    assert {rule.id for rule in NANOTRON.rules} - tested == arithmetic | {"learned-positions"}


def test_layers_by_cost() -> None:
    """A stage is closed by the layer with which the running cost exceeds its share; the head weighs on the last one."""
    assert layers_by_cost(llama70b(), 4) == (21, 20, 20, 19)
    assert layers_by_cost(llama8b(), 1) == (32,)
    # One layer weighs 2^24, the head four of them: the running cost equals the share of two stages exactly.
    tie = llama8b(layers=16, hidden=2048, ffn=8192, heads=16, kv_heads=16, vocab=131072)
    assert layers_by_cost(tie, 4) == (6, 5, 5, 0)
    assert layers_by_cost(tie, 4, tie_closes=True) == (5, 5, 5, 1)


def test_a_split_with_an_empty_stage_is_none() -> None:
    """Plans have a layer in every stage; published runs keep the split they had."""
    small = llama8b(layers=28, hidden=3072, ffn=8192, heads=24, kv_heads=8, vocab=131072)
    assert layers_by_cost(small, 8)[-1] == 0
    assert Nanotron().default_layout(small, 8, 1) is None
    assert Nanotron(published=True).default_layout(small, 8, 1) is not None
    assert Nanotron().default_layout(llama70b(), 4, 2) is None


def test_states_of_issue_261() -> None:
    """huggingface/nanotron#261: 20 bytes a parameter, 6 + 2 + 12 over the replicas with sharded states."""
    whole = NANOTRON.state_bytes(make_job(), make_batch(), make_batch().shard_degree)
    assert float((whole.weights + whole.gradients + whole.optimizer)[0]) == 20
    batch = make_batch(zero_stage=1, shard_degree=24, dp=24)
    split = NANOTRON.state_bytes(make_job(), batch, batch.shard_degree)
    assert float((split.weights + split.gradients + split.optimizer)[0]) == pytest.approx(8 + 12 / 24)


@pytest.mark.parametrize(("cp", "factor"), [(1, 1.0), (2, 1.5), (4, 1.75)])
def test_the_last_context_rank_attends_to_most_tokens(cp: int, factor: float) -> None:
    """Each rank holds one run of the sequence; of four ranks the last sees 7/8 of the keys where the average is 1/2."""
    asked = question("llama-3-8b", machines("h100", 8), "nanotron", seq_len=32768)
    balanced = replace(asked, backend=asked.backend.with_habits(context_parallel_balanced=True))
    batch = strategy(asked, cp=cp)
    slow, even = (attention_s(Work(context, batch), ("attention", "dense"))[0][0] for context in (asked, balanced))
    assert slow == pytest.approx(factor * even)
    packed = replace(asked, job=asked.job.model_copy(update={"sample_tokens": 1024}))
    assert attention_s(Work(packed, batch), ("attention", "dense"))[0][0] < even
