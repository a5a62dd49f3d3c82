"""Every rule that accelerate adds to FSDP2 and DeepSpeed, and what its spelling changes of their step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.backends import BACKENDS
from planner.backends.base import BufferContext
from planner.backends.deepspeed import EAGER_LOSS_BYTES
from tests.helpers import (
    RuleCase,
    Situation,
    check_rule_case,
    h100_cluster,
    llama8b,
    llama70b,
    make_batch,
    make_job,
)
from tests.strategies import estimated, machines, question

FSDP, DEEPSPEED = BACKENDS["accelerate-fsdp"], BACKENDS["accelerate-deepspeed"]


def sharded() -> Situation:
    """70B over 128 GPUs."""
    columns = {"dp": 128, "zero_stage": 3, "shard_degree": 128, "stage_layers": [80]}
    return Situation(llama70b(), h100_cluster(128), make_job(), columns)


def context() -> Situation:
    """Long sequences over 4 ranks, 2 copies of 8 shards."""
    columns = {"cp": 4, "dp": 4, "zero_stage": 3, "shard_degree": 8, "stage_layers": [32]}
    return Situation(llama8b(), h100_cluster(16), make_job(seq_len=65536), columns)


def single() -> Situation:
    """One rank a shard group, which plain FSDP2 replicates."""
    columns = {"dp": 16, "zero_stage": 2, "shard_degree": 16, "stage_layers": [32]}
    return Situation(llama8b(), h100_cluster(16), make_job(), columns)


def zero() -> Situation:
    """ZeRO-1 without a pipeline."""
    columns = {"dp": 16, "zero_stage": 1, "shard_degree": 16, "stage_layers": [32]}
    return Situation(llama8b(), h100_cluster(16), make_job(), columns)


FSDP_CASES = [
    RuleCase(
        "no-tensor-parallel",
        sharded,
        {"tp": 8, "sequence_parallel": True, "dp": 16, "shard_degree": 16},
        ("tp(8), must be 1",),
    ),
    RuleCase("shard-group", single, {"zero_stage": 0, "shard_degree": 1}, ("shard_degree(1)", "zero_stage(0)")),
    RuleCase("replicas-with-context", context, {"shard_degree": 4}, ("cp(4)", "dp(4)", "dp_shard_size 1")),
    RuleCase("alibi-attention", single, {"model": llama8b(position="alibi")}, ("flash_attention(True)", "alibi")),
]
DEEPSPEED_CASES = [
    RuleCase(
        "no-pipeline",
        zero,
        {"pp": 2, "dp": 8, "shard_degree": 8, "schedule": "1f1b", "stage_layers": [16, 16]},
        ("pp(2), must be 1",),
    ),
    RuleCase("alibi-attention", zero, {"model": llama8b(position="alibi")}, ("flash_attention(True)", "alibi")),
]


@pytest.mark.parametrize("case", FSDP_CASES, ids=lambda case: case.rule)
def test_fsdp_rules(case: RuleCase) -> None:
    """Each rule breaks alone and says why."""
    check_rule_case(FSDP, case)


@pytest.mark.parametrize("case", DEEPSPEED_CASES, ids=lambda case: case.rule)
def test_deepspeed_rules(case: RuleCase) -> None:
    """Each rule breaks alone and says why."""
    check_rule_case(DEEPSPEED, case)


def test_rules_are_the_parents_and_own_ones() -> None:
    """Nothing of the parent's is lost, and each own rule has a case here."""
    for backend, parent, cases in ((FSDP, "fsdp", FSDP_CASES), (DEEPSPEED, "deepspeed", DEEPSPEED_CASES)):
        inherited = BACKENDS[parent].rules
        assert backend.rules[: len(inherited)] == inherited
        assert [rule.id for rule in backend.rules[len(inherited) :]] == [case.rule for case in cases]


def test_context_ranks_may_be_the_whole_shard_group() -> None:
    """cp alone shards the model where there is one copy; dp_shard_size is then 1."""
    columns = {"cp": 8, "dp": 1, "zero_stage": 3, "shard_degree": 8, "stage_layers": [32]}
    situation = Situation(llama8b(), h100_cluster(8), make_job(seq_len=65536), columns)
    assert not any(mask[0] for _, mask in FSDP.broken_rules(situation.context(FSDP)))


def test_step_differs_where_accelerate_says_so() -> None:
    """16-bit gradient reduction, the Hugging Face loss, no temporary of a fused AdamW, no partial recomputation."""
    for precision, width in (("bf16", 2), ("fp16", 2), ("fp8", 2), ("fp32", 4)):
        assert FSDP.habits.gradient_reduce_bytes(make_job(precision=precision)) == width
    assert FSDP.habits.loss_bytes_per_logit(make_job()) == EAGER_LOSS_BYTES
    states = FSDP.state_bytes(make_job(), make_batch(zero_stage=3), make_batch(shard_degree=8).shard_degree)
    assert float(states.step_temporary[0]) == 0
    assert float((states.weights + states.gradients + states.optimizer)[0]) == pytest.approx(16 / 8)
    kinds = FSDP.recompute_kinds(llama8b(), make_job())
    assert [(kind.id, kind.layer_count) for kind in kinds] == [("none", False), ("full", False)]
    assert DEEPSPEED.habits == BACKENDS["deepspeed"].habits


@pytest.mark.parametrize(("tied", "kept"), [(False, 1.0), (True, 2.0)])
def test_head_stays_gathered_and_an_untied_embedding_does_not(tied: bool, kept: float) -> None:
    """Half of the parameters outside the layers where embedding and head are two tables."""
    model, billion = llama70b(tied=tied), np.array([1e9])
    context = BufferContext(
        model=model,
        job=make_job(),
        batch=make_batch(zero_stage=3, shard_degree=8),
        rank_params=8 * billion,
        layer_params=billion,
        root_params=2 * billion,
        distinct_weight_params=billion,
    )
    buffers = FSDP.buffer_bytes(context)
    assert float(buffers["gathered head"][0]) == pytest.approx(kept * 2e9)
    assert float(buffers["unsharded gradients"][0]) == pytest.approx(4e9)
    adapters = FSDP.buffer_bytes(replace(context, trained_share=0.01))
    assert float(adapters["unsharded gradients"][0]) == pytest.approx(4e7)


def test_network_carries_half_the_gradients_of_plain_fsdp() -> None:
    """The reduce-scatter of bf16 gradients is cheaper than that of fp32 ones on the same plan."""
    job = {"seq_len": 4096, "global_batch": 64}
    columns = {"zero_stage": 3, "recompute": "full"}
    cheaper = estimated(question("llama-3-8b", machines("h100", 64), "accelerate-fsdp", **job), **columns)
    dearer = estimated(question("llama-3-8b", machines("h100", 64), "fsdp", **job), **columns)
    assert cheaper.step_time_s < dearer.step_time_s
