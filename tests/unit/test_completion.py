"""A configuration's stated fields become a whole strategy, or findings that name everything wrong."""

from __future__ import annotations

from typing import Any

import pytest

from planner.reading import Configuration, StatedStrategy
from planner.service.completion import Completed, complete, stated_gpus
from planner.specs.convert import to_strategy
from planner.specs.strategy import Recompute
from tests.random_plans import corner_plans, random_plans
from tests.strategies import machines, question


def completed(
    *,
    gpus: int = 64,
    backend: str = "megatron",
    model: str = "llama-3-8b",
    global_batch: int | None = 64,
    **stated: Any,
) -> Completed:
    context = question("llama-3-8b", machines("h100", gpus), backend, seq_len=4096, global_batch=64)
    read = Configuration(format="test", backend=backend, global_batch=global_batch, strategy=StatedStrategy(**stated))
    return complete(read, context.model, context.cluster, context.job)


def ids(done: Completed) -> list[str]:
    return [finding.id for finding in done.findings]


@pytest.mark.parametrize("backend", ["megatron", "deepspeed", "fsdp"])
def test_a_whole_strategy_stays_what_it_is(backend: str) -> None:
    """Every field stated: nothing is assumed, nothing is changed."""
    for document in (*random_plans(backend, 40), *list(corner_plans(backend))[::40]):
        strategy, request = document.best.strategy, document.request
        stated = {name: getattr(strategy, name) for name in StatedStrategy.__dataclass_fields__}
        read = Configuration(
            format="test", backend=backend, global_batch=strategy.global_batch, strategy=StatedStrategy(**stated)
        )
        done = complete(read, request.model, request.cluster, request.job)
        assert done.batch is not None
        assert not done.findings
        assert not done.assumptions
        kinds = done.backend.recompute_kinds(request.model, done.job)
        assert to_strategy(done.batch, 0, kinds, done.job) == strategy


def test_degrees_that_do_not_fill_the_machines() -> None:
    """Named with the equation; nothing is priced."""
    done = completed(tp=3, zero_stage=1)
    assert ids(done) == ["world-size"]
    assert "tp(3) * cp(1) * pp(1) = 3 does not divide the 64 GPUs" in done.findings[0].message
    assert done.batch is None
    wrong = completed(tp=8, dp=4, zero_stage=1)
    assert "dp(4)" in wrong.findings[0].message
    assert "dp(8)" in wrong.findings[0].allowed


def test_batch_algebra() -> None:
    """256 = 2 x 18 x dp has no solution; the nearest batches are named (OpenRLHF#346)."""
    done = completed(micro_batch=2, grad_accum=18, gpus=8, global_batch=256, zero_stage=1)
    assert ids(done) == ["batch-algebra"]
    assert "256 / 288" in done.findings[0].got
    assert "288" in done.findings[0].allowed
    # Two of the three give the third.
    accumulated = completed(micro_batch=2, grad_accum=4, gpus=8, global_batch=None, zero_stage=1)
    assert accumulated.job.global_batch == 64
    derived = completed(grad_accum=4, gpus=8, global_batch=64, zero_stage=1)
    assert derived.batch is not None
    assert int(derived.batch.micro_batch[0]) == 2


def test_layers_that_get_lost() -> None:
    """Stages that hold fewer layers than the model, and splits that are not whole (Megatron-LM#1304, #468)."""
    lost = completed(pp=4, layers_per_stage=(7, 8, 8, 8), zero_stage=1)
    assert ids(lost) == ["layers-lost"]
    assert "31 layers" in lost.findings[0].message
    uneven = completed(pp=5, gpus=80, global_batch=80, zero_stage=1)
    assert not uneven.findings or ids(uneven) == ["layer-split"]


def test_recompute_of_other_modules() -> None:
    """Megatron takes any list of modules, other frameworks only what they have."""
    done = completed(recompute=Recompute(mode="selective", modules=("mlp", "core_attn")), zero_stage=1)
    assert not done.findings
    assert done.batch is not None
    kind = done.backend.recompute_kinds(question("llama-3-8b").model, done.job)[int(done.batch.recompute_kind[0])]
    assert kind.mode == "selective"
    assert {"mlp_up", "mlp_act"} <= set(kind.drops)
    refused = completed(backend="deepspeed", recompute=Recompute(mode="selective", modules=("mlp",)), zero_stage=1)
    assert ids(refused) == ["recompute-choice"]


def test_gpus_from_the_degrees() -> None:
    """Stated replicas times the other degrees; nothing where replicas are not stated."""
    stated = StatedStrategy(tp=8, pp=2, dp=4)
    assert stated_gpus(Configuration(format="test", backend="megatron", strategy=stated)) == 64
    assert stated_gpus(Configuration(format="test", backend="megatron", strategy=StatedStrategy(tp=8))) is None
