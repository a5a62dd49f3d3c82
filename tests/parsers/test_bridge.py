"""Megatron-Bridge builds the rendered configuration and validates it, and refuses what ours refuses.

Needs both packages, megatron-bridge and megatron-core, in the interpreter of the parsers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from planner.backends import get_backend
from planner.backends.base import RuleContext
from planner.reading import read_configuration
from planner.reading.texts.shell import launches, read_script
from planner.render import render_plan
from planner.specs.convert import from_strategy
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Recompute
from tests.golden.plans import CASES, case_names
from tests.parsers.conftest import Counts
from tests.parsers.interpreter import answers, lacking, parser
from tests.parsers.matrix import Row
from tests.random_plans import corner_plans, random_plans

pytestmark = pytest.mark.parsers

RUNNER = Path(__file__).with_name("run_bridge.py")


PARSERS = ("megatron-bridge", "megatron-core")
NEEDED = ("torch", "omegaconf", "megatron/bridge/recipes", "megatron/training/arguments.py")
needs_bridge = pytest.mark.skipif(bool(lacking(*NEEDED)), reason=lacking(*NEEDED))


def run(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of the cases, in their order."""
    return answers(RUNNER, cases)


def case_of(document: PlanDocument, name: str) -> dict[str, Any]:
    """The rendered files of a plan as the runner takes them."""
    files = render_plan(document)
    (launch,) = launches(read_script(files, "launch.sh"))
    architecture = document.request.cluster.accelerator.architecture
    return {
        "id": name,
        "script": files["pretrain_bridge.py"],
        "overrides": files["bridge_overrides.txt"],
        "world": document.best.strategy.gpus,
        "environment": dict(launch.environment),
        "capability": 10 if architecture.startswith("blackwell") else 8 if architecture == "ampere" else 9,
    }


@needs_bridge
def test_random_and_corner_plans_are_accepted(counts: Counts) -> None:
    """No plan is refused, and the framework derives the plan's replicas, chunks and micro-batches."""
    plans = [*random_plans("megatron-bridge", 60, seed=21), *islice(corner_plans("megatron-bridge"), 0, None, 12)]
    plans += [CASES[name].document for name in case_names("megatron-bridge")]
    results = run([case_of(plan, str(index)) for index, plan in enumerate(plans)])
    refused = [result for result in results if not result["accepted"]]
    counts(Row(target="megatron-bridge", parser=parser(*PARSERS), plans=len(plans), refused=len(refused)))
    assert not refused
    for plan, result in zip(plans, results, strict=True):
        strategy = plan.best.strategy
        assert (result["dp"], result["vpp"]) == (strategy.dp, strategy.vpp)
        assert result["micro_batches"] == strategy.grad_accum
        assert result["layers"] == plan.request.model.layers
        assert result["sequence_parallel"] == strategy.sequence_parallel
        assert result["sharded"] == (strategy.zero_stage == 1)
        assert result["bf16"] == (strategy.precision not in ("fp16", "fp32"))


DENSE = "megatron-bridge-dense"
BROKEN: tuple[tuple[str, dict[str, str | None], str, bool], ...] = (
    # name, changed fields (None: left out), id of our rule or finding, whether Megatron-Bridge refuses it, too
    ("heads over tp", {"model.tensor_model_parallel_size": "6"}, "world-size", True),
    ("batch", {"train.global_batch_size": "513"}, "batch-divisible", True),
    (
        "sequence",
        {"model.context_parallel_size": "4", "model.seq_length": "8190", "dataset.seq_length": "8190"},
        "context-parallel-sequence",
        True,
    ),
    ("experts", {"model.expert_model_parallel_size": "4"}, "expert-parallel-needs-experts", True),
    ("method", {"model.recompute_granularity": "full"}, "recompute-needs-method", True),
    ("field", {"model.zero_stage": "3"}, "field-unknown", True),
    ("section", {"ddp.overlap_gradients": "True"}, "field-unknown", True),
    ("layout", {"model.pipeline_model_parallel_layout": "Et*19|t*21|t*21|t*18L"}, "layers-assigned", True),
    ("offload", {"optimizer.optimizer_cpu_offload": "True"}, "offload-needs-precision-aware", False),
    ("chunks", {"model.virtual_pipeline_model_parallel_size": "3"}, "layers-over-virtual-stages", False),
    ("few micro-batches", {"train.global_batch_size": "4"}, "interleaved-micro-batches", False),
    (
        "gather without shards",
        {"ddp.use_distributed_optimizer": "False", "optimizer.use_distributed_optimizer": "False"},
        "param-gather-needs-distributed-optimizer",
        False,
    ),
    ("one section", {"optimizer.use_distributed_optimizer": "False"}, "sharding-contradicts-itself", False),
)


def changed(text: str, changes: dict[str, str | None]) -> str:
    """The overrides with fields replaced, added or left out."""
    kept = [line for line in text.splitlines() if line.partition("=")[0] not in changes]
    return "\n".join([*kept, *(f"{field}={value}" for field, value in changes.items() if value is not None)]) + "\n"


def refusals(overrides: str, document: PlanDocument) -> set[str]:
    """Ids of our findings and of the broken rules for these overrides, started as the plan would be."""
    files = {**render_plan(document), "bridge_overrides.txt": overrides}
    configuration = read_configuration({name: files[name] for name in ("launch.sh", "bridge_overrides.txt")})
    found = {finding.id for finding in configuration.findings}
    backend, model = get_backend("megatron-bridge"), configuration.model
    whole = {name: value for name, value in vars(configuration.strategy).items() if value is not None}
    if model is None or not {"dp", "layers_per_stage"} <= whole.keys():
        return found
    update = {"grad_accum": 1, **whole, "seq_len": configuration.seq_len, "recompute": Recompute()}
    strategy = document.best.strategy.model_copy(update=update)
    job = document.request.job.model_copy(
        update={"seq_len": configuration.seq_len, "global_batch": configuration.global_batch}
    )
    kinds = backend.recompute_kinds(model, job)
    context = RuleContext(model, document.request.cluster, job, from_strategy(strategy, kinds), kinds)
    return found | {rule.id for rule, broken in backend.broken_rules(context) if broken[0]}


@pytest.mark.parametrize(("name", "changes", "refusal", "refused"), BROKEN, ids=[name for name, *_ in BROKEN])
def test_broken_overrides_are_refused_by_our_rules(
    name: str, changes: dict[str, str | None], refusal: str, refused: bool
) -> None:
    """Each has its rule or finding, also those that Megatron-Bridge accepts."""
    document = CASES[DENSE].document
    overrides = render_plan(document)["bridge_overrides.txt"]
    assert refusal in refusals(changed(overrides, changes), document)
    assert refusal not in refusals(overrides, document)


@needs_bridge
def test_what_megatron_bridge_refuses_and_what_it_accepts_silently(counts: Counts) -> None:
    """validate() stops at the first kind; the second runs into the error later, so only our rules tell."""
    case = case_of(CASES[DENSE].document, "")
    cases = [{**case, "id": name, "overrides": changed(case["overrides"], new)} for name, new, _, _ in BROKEN]
    cases.append({**case, "id": "launch variable", "environment": {}})
    accepted = {result["id"]: result["accepted"] for result in run(cases)}
    assert accepted == {name: not refused for name, _, _, refused in BROKEN} | {"launch variable": True}
    both = sum(refused for *_, refused in BROKEN)
    row = {"broken": len(BROKEN), "both": both, "ours": len(BROKEN) - both}
    counts(Row(target="megatron-bridge", parser=parser(*PARSERS), **row))
