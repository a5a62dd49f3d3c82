"""A plan in another framework's spelling: the job stays, what changes is listed, the impossible is refused by rule."""

from __future__ import annotations

import pytest

from planner.backends import get_backend
from planner.cost.context import CostContext
from planner.cost.evaluate import evaluate
from planner.errors import InputError
from planner.search.legality import refusals
from planner.search.nearest import nearest
from planner.service.conversion import SAME_JOB, convert_document, target_name
from planner.specs.convert import from_strategy, to_strategy
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Offload, Recompute, Strategy
from tests.random_plans import plan_document, random_plans
from tests.strategies import machines, question

SMALL = {"seq_len": 4096, "global_batch": 64}


def plan(backend: str, *, model: str = "llama-3-8b", gpus: int = 16, **fields: object) -> PlanDocument:
    context = question(model, machines("h100", gpus), backend, **SMALL)
    pp, tp, cp = int(str(fields.get("pp", 1))), int(str(fields.get("tp", 1))), int(str(fields.get("cp", 1)))
    dp = gpus // (pp * tp * cp)
    values = {
        "dp": dp,
        "layers_per_stage": context.backend.default_layout(context.model, pp, 1),
        "pipeline_schedule": context.backend.schedules(pp, 1)[0],
        "grad_accum": 64 // dp,
        "global_batch": 64,
        "seq_len": 4096,
        "shard_degree": dp * cp if fields.get("zero_stage") else 1,
        **fields,
    }
    return plan_document(context, Strategy.model_validate(values))


def test_full_sharding_goes_both_ways() -> None:
    """ZeRO-3 and FSDP are one strategy in two spellings: nothing of it changes."""
    there = convert_document(plan("deepspeed", zero_stage=3, recompute=Recompute(mode="full")), "fsdp")
    assert there.document.best.backend == "fsdp"
    back = convert_document(there.document, "deepspeed")
    assert back.document.best.strategy == there.document.best.strategy
    assert back.document.best.strategy.zero_stage == 3
    assert there.document.request.backend == "fsdp"


def test_sharding_that_the_target_has_not_is_replaced_and_named() -> None:
    """FSDP has no stage 1: stage 2 keeps the job, and the change is listed."""
    done = convert_document(plan("deepspeed", zero_stage=1, recompute=Recompute(mode="full")), "fsdp")
    assert "zero_stage 2 instead of 1" in done.lost
    source = plan("deepspeed", zero_stage=1).best.strategy
    for name in (*SAME_JOB, "dp", "global_batch", "grad_accum"):
        assert getattr(done.document.best.strategy, name) == getattr(source, name)


def test_part_of_the_offload_is_lost_by_name() -> None:
    """FSDP offloads all or nothing."""
    offload = Offload(optimizer=0.1, device="cpu")
    done = convert_document(plan("deepspeed", zero_stage=3, offload=offload, recompute=Recompute(mode="full")), "fsdp")
    assert any("10% of the optimizer to cpu" in line for line in done.lost)


def test_a_pipeline_does_not_go_into_fsdp() -> None:
    """The rule is quoted with its values, and the nearest plan is one that FSDP runs."""
    with pytest.raises(InputError) as caught:
        convert_document(plan("megatron", pp=2, zero_stage=1), "fsdp")
    assert "no-pipeline" in caught.value.message
    assert "pp(2)" in caught.value.message
    assert "--backend fsdp --pin" in (caught.value.hint or "")


def test_accelerate_means_the_kind_of_the_source() -> None:
    """One word for two targets."""
    assert target_name("fsdp", "megatron") == "fsdp"
    with pytest.raises(InputError, match="this choice does not exist"):
        target_name("nowhere", "fsdp")


@pytest.mark.parametrize("backend", ["megatron", "deepspeed", "fsdp"])
def test_the_nearest_plan_of_a_legal_one_is_itself(backend: str) -> None:
    """Where a strategy is legal and fits, nothing is nearer than it."""
    fitting = 0
    for document in random_plans(backend, 6, seed=5):
        request = document.request
        context = CostContext(request.model, request.cluster, request.job, get_backend(backend))
        row = nearest(context, document.best.strategy)
        assert row is not None
        found = to_strategy(row, 0, context.recompute_kinds, context.job)
        wanted = from_strategy(document.best.strategy, context.recompute_kinds)
        if evaluate(context, wanted).fits[0]:
            fitting += 1
            for name in ("tp", "pp", "cp", "ep", "micro_batch", "zero_stage"):
                assert getattr(found, name) == getattr(document.best.strategy, name)
        assert not refusals(context, row)
    assert fitting


def test_stages_are_those_of_the_target() -> None:
    """Megatron-LM takes any split; nanotron hands out layers by cost, and what is told of memory is of that split."""
    free = plan("megatron", gpus=6, tp=2, sequence_parallel=True, pp=3, layers_per_stage=(10, 12, 10), dp=1)
    done = convert_document(free, "nanotron")
    assert done.document.best.strategy.layers_per_stage == (12, 11, 9)
    assert any("12,11,9" in line and "10,12,10" in line for line in done.lost)
    assert done.document.best.strategy.tp == 2


def test_what_does_not_fit_is_told() -> None:
    """The same mesh may need more memory in another framework: the files are written, and the shortage is named."""
    large = convert_document(plan("megatron", gpus=8), "nanotron")
    assert not large.document.best.estimate.fits
    assert any("GPU memory" in line for line in large.short)
    small = convert_document(plan("megatron", gpus=8, tp=8, sequence_parallel=True), "nanotron")
    assert small.document.best.estimate.fits
    assert small.short == ()
