"""Megatron-LM itself reads what is rendered for it, and refuses what our rules refuse.

Its parser, validators, configurations, process groups, layer split and model run in a subprocess (run_megatron.py)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.backends import get_backend
from planner.backends.base import RuleContext
from planner.cost.context import CostContext, Work
from planner.cost.weights import Ends, layer_weights
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

RUNNER = Path(__file__).with_name("run_megatron.py")


NEEDED = ("torch", "einops", "megatron/training/arguments.py")
needs_megatron = pytest.mark.skipif(bool(lacking(*NEEDED)), reason=lacking(*NEEDED))


def run(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of the cases, in their order."""
    return answers(RUNNER, cases)


def arguments_of(files: dict[str, str]) -> dict[str, Any]:
    """What launch.sh gives to pretrain_gpt.py, and its environment."""
    (launch,) = launches(read_script(files, "launch.sh"))
    return {"arguments": [word.text for word in launch.arguments], "environment": dict(launch.environment)}


def case_of(document: PlanDocument, name: str, ranks: list[int] | None = None) -> dict[str, Any]:
    architecture = document.request.cluster.accelerator.architecture
    capability = 10 if architecture.startswith("blackwell") else 8 if architecture == "ampere" else 9
    return {
        "id": name,
        "world": document.best.strategy.gpus,
        "capability": capability,
        "ranks": ranks,
        **arguments_of(render_plan(document)),
    }


def rank_parameters(document: PlanDocument, rank: int) -> int:
    """Parameters of one rank as the cost model counts them, balancing biases apart: Megatron keeps those as buffers."""
    request, strategy = document.request, document.best.strategy
    backend = get_backend(document.best.backend)
    context = CostContext(model=request.model, cluster=request.cluster, job=request.job, backend=backend)
    batch = from_strategy(strategy, backend.recompute_kinds(request.model, request.job))
    work, kinds = Work(context, batch), request.model.layer_kinds()
    stage = rank // (strategy.gpus // strategy.pp)
    ends = [Ends(work).first] if stage == 0 else []
    ends += [Ends(work).last] if stage == strategy.pp - 1 else []
    starts = np.concatenate([[0], np.cumsum(strategy.layers_per_stage)])
    held = [
        kind
        for virtual in range(stage, strategy.pp * strategy.vpp, strategy.pp)
        for kind in kinds[starts[virtual] : starts[virtual + 1]]
    ]
    weights = [layer_weights(work, kind) for kind in held] + ends
    moe = request.model.moe
    biases = moe.experts if moe is not None and moe.expert_bias else 0
    mixtures = sum(mlp == "moe" for _, mlp in held) + (request.model.mtp_layers if stage == strategy.pp - 1 else 0)
    total = float(sum(float(weight.dense[0] + weight.expert[0]) for weight in weights)) - biases * mixtures
    assert total == int(total)
    return int(total)


@needs_megatron
def test_random_and_corner_plans_are_accepted(counts: Counts) -> None:
    """No plan is refused; Megatron deals layers, micro-batches and parameters of the ranks as the plan says."""
    plans = [*random_plans("megatron", 40, seed=11), *islice(corner_plans("megatron"), 0, None, 12)]
    ranks = [[0, plan.best.strategy.gpus - 1] if index < 40 else None for index, plan in enumerate(plans)]
    results = run([case_of(plan, str(index), ranks[index]) for index, plan in enumerate(plans)])
    refused = [result for result in results if not result["accepted"]]
    built = sum(len(result.get("parameters", ())) for result in results)
    row = {"plans": len(plans), "refused": len(refused), "ranks": built}
    counts(Row(target="megatron", parser=parser("megatron-core"), **row))
    assert not refused, refused[:3]
    for plan, result in zip(plans, results, strict=True):
        strategy = plan.best.strategy
        assert result["dp"] == strategy.dp
        assert result["vpp"] == strategy.vpp
        assert tuple(result["layers"]) == strategy.layers_per_stage
        assert result["micro_batches"] == strategy.grad_accum
        assert result["sequence_parallel"] == strategy.sequence_parallel
        for rank, count in result["parameters"].items():
            assert count == rank_parameters(plan, int(rank)), (plan.request.model.name, rank, strategy)


@needs_megatron
def test_golden_cases_are_accepted(counts: Counts) -> None:
    """Every rendered situation of the golden files."""
    names = case_names("megatron")
    refused = [r for r in run([case_of(CASES[name].document, name) for name in names]) if not r["accepted"]]
    counts(Row(target="megatron", parser=parser("megatron-core"), plans=len(names), refused=len(refused)))
    assert not refused


DENSE = "megatron-recompute-block"
BROKEN: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    # name, golden case, changed arguments (None: left out, True: a switch), id of our rule or finding
    ("heads over tp", DENSE, {"tensor-model-parallel-size": "6"}, "world-size"),
    ("kv heads and tp", DENSE, {"num-query-groups": "6"}, "model-contradicts-itself"),
    ("batch", DENSE, {"global-batch-size": "514"}, "batch-divisible"),
    ("ffn over tp", DENSE, {"ffn-hidden-size": "28670"}, "ffn-over-tp"),
    ("chunks", DENSE, {"num-virtual-stages-per-pipeline-rank": "3"}, "layers-over-virtual-stages"),
    ("chunk size", DENSE, {"num-layers-per-virtual-pipeline-stage": "7"}, "layers-over-virtual-stages"),
    (
        "few micro-batches",
        DENSE,
        {"num-virtual-stages-per-pipeline-rank": "5", "global-batch-size": "8", "eval-iters": None},
        "interleaved-micro-batches",
    ),
    ("stages", DENSE, {"num-layers": "78"}, "layers-over-stages"),
    ("first stage", DENSE, {"decoder-first-pipeline-num-layers": "19"}, "layers-over-stages"),
    ("layout sum", DENSE, {"pipeline-model-parallel-layout": "Et*19|t*21|t*21|t*18L"}, "layers-assigned"),
    ("layout stages", DENSE, {"pipeline-model-parallel-layout": "Et*19|t*21|t*40L"}, "layout-stages"),
    ("layout letters", DENSE, {"pipeline-model-parallel-layout": "Ex*19|t*21|t*21|t*19L"}, "value-of-wrong-form"),
    (
        "chunks twice",
        DENSE,
        {"num-virtual-stages-per-pipeline-rank": "5", "num-layers-per-virtual-pipeline-stage": "4"},
        "virtual-stages-stated-twice",
    ),
    (
        "chunks without stages",
        DENSE,
        {"pipeline-model-parallel-size": "1", "num-virtual-stages-per-pipeline-rank": "5"},
        "virtual-stages-need-pipeline",
    ),
    ("gather", DENSE, {"use-distributed-optimizer": None}, "param-gather-needs-distributed-optimizer"),
    ("gather alone", DENSE, {"overlap-grad-reduce": None}, "param-gather-needs-grad-reduce"),
    ("instances", DENSE, {"num-distributed-optimizer-instances": "3"}, "shard-degree-divides"),
    ("sequence", DENSE, {"context-parallel-size": "4", "seq-length": "8190"}, "context-parallel-sequence"),
    ("positions", DENSE, {"max-position-embeddings": "4096"}, "sequence-beyond-positions"),
    ("recompute method", DENSE, {"recompute-method": None}, "recompute-needs-method"),
    ("selective method", DENSE, {"recompute-granularity": "selective"}, "recompute-method-refused"),
    ("offload alone", DENSE, {"optimizer-cpu-offload": True}, "offload-needs-precision-aware"),
    (
        "precision-aware alone",
        DENSE,
        {"use-precision-aware-optimizer": True, "use-distributed-optimizer": None, "overlap-param-gather": None},
        "precision-aware-needs-distributed-optimizer",
    ),
    ("moments alone", DENSE, {"exp-avg-dtype": "bf16"}, "state-format-needs-precision-aware"),
    ("loss", DENSE, {"cross-entropy-fusion-impl": "te"}, "te-loss-refused"),
    ("tp overlap", DENSE, {"sequence-parallel": None}, "tp-overlap-needs-sequence-parallel"),
    ("torch fsdp", DENSE, {"use-torch-fsdp2": True}, "torch-fsdp2-refuses"),
    ("unknown flag", DENSE, {"zero-stage": "3"}, "flag-unknown"),
    ("old flag", DENSE, {"model-parallel-size": "8"}, "flag-moved"),
    ("configuration name", DENSE, {"num-layers-in-first-pipeline-stage": "20"}, "flag-moved"),
    ("ep without experts", DENSE, {"expert-model-parallel-size": "4"}, "expert-parallel-needs-experts"),
    ("no micro-batch", DENSE, {"micro-batch-size": None}, "micro-batch-missing"),
    ("number", DENSE, {"num-layers": "eighty"}, "value-of-wrong-form"),
    ("modules", "megatron-moe", {"recompute-modules": "attention"}, "recompute-modules-unknown"),
    ("grouped gemm", "megatron-moe", {"moe-grouped-gemm": None}, "moe-act-needs-grouped-gemm"),
    ("experts over ep", "megatron-moe", {"num-experts": "255"}, "experts-over-ep"),
    ("expert grid", "megatron-moe", {"expert-tensor-parallel-size": "3"}, "expert-world-size"),
    (
        "experts under tp",
        "megatron-moe",
        {"tensor-model-parallel-size": "2", "expert-model-parallel-size": "32"},
        "moe-needs-sequence-parallel",
    ),
)


BUILT = {"ffn over tp": [0]}
"""Refused only when the model is built, so a rank is named."""


def changed(case: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The case with arguments replaced, added or left out."""
    words: list[str] = []
    skip = False
    for word in case["arguments"]:
        if word.startswith("--"):
            skip = word[2:] in changes
        if not skip:
            words.append(word)
    for name, value in changes.items():
        words += [] if value is None else [f"--{name}"] if value is True else [f"--{name}", value]
    return {**case, "arguments": words, "ranks": None}


def refusals(case: dict[str, Any], document: PlanDocument) -> set[str]:
    """Ids of our findings and of the broken rules of the backend for these arguments."""
    environment = "".join(f"export {name}={value}\n" for name, value in case["environment"].items())
    line = "torchrun --nnodes {} --nproc-per-node 8 pretrain_gpt.py {}\n".format(
        case["world"] // 8, " ".join(f"'{word}'" for word in case["arguments"])
    )
    configuration = read_configuration({"run.sh": environment + line})
    found = {finding.id for finding in configuration.findings}
    stated, backend = configuration.strategy, get_backend("megatron")
    whole = {name: value for name, value in vars(stated).items() if value is not None}
    if configuration.model is None or configuration.seq_len is None or "dp" not in whole:
        return found
    if "layers_per_stage" not in whole or "grad_accum" not in whole:
        whole.setdefault("grad_accum", 1)
        whole.setdefault("vpp", 1)
        whole.setdefault("layers_per_stage", (1,) * (whole["pp"] * whole["vpp"]))
    # The rules are asked about the layout; recomputation has findings of its own.
    strategy = document.best.strategy.model_copy(
        update={**whole, "seq_len": configuration.seq_len, "recompute": Recompute()}
    )
    job = document.request.job.model_copy(
        update={"seq_len": configuration.seq_len, "global_batch": configuration.global_batch or 1}
    )
    kinds = backend.recompute_kinds(configuration.model, job)
    context = RuleContext(configuration.model, document.request.cluster, job, from_strategy(strategy, kinds), kinds)
    return found | {rule.id for rule, broken in backend.broken_rules(context) if broken[0]}


def broken_cases() -> Iterator[tuple[dict[str, Any], PlanDocument, str]]:
    for name, base, changes, refusal in BROKEN:
        document = CASES[base].document
        yield {**changed(case_of(document, name), changes), "ranks": BUILT.get(name)}, document, refusal


@pytest.mark.parametrize("index", range(len(BROKEN)), ids=[name for name, *_ in BROKEN])
def test_broken_arguments_are_refused_by_our_rules(index: int) -> None:
    """Each has its rule or finding; the unbroken case has none of them."""
    case, document, refusal = list(broken_cases())[index]
    assert refusal in refusals(case, document)
    assert refusal not in refusals(case_of(document, "as it was"), document)


@needs_megatron
def test_broken_arguments_are_refused_by_megatron(counts: Counts) -> None:
    """Megatron stops at every one of them."""
    results = run([case for case, _, _ in broken_cases()])
    assert not [result["id"] for result in results if result["accepted"]]
    counts(Row(target="megatron", parser=parser("megatron-core"), broken=len(results), both=len(results)))


@needs_megatron
def test_launch_variable() -> None:
    """tp or cp need CUDA_DEVICE_MAX_CONNECTIONS before Blackwell, Megatron-FSDP refuses it; ours says both."""
    document = CASES[DENSE].document
    case = case_of(document, "without")
    without = {**case, "environment": {}}
    sharded = changed(
        {**case, "id": "with FSDP"},
        {"use-megatron-fsdp": True, "ckpt-format": "fsdp_dtensor", "pipeline-model-parallel-size": "1"},
    )
    blackwell = {**without, "id": "Blackwell", "capability": 10}
    results = run([without, sharded, blackwell])
    assert [result["accepted"] for result in results] == [False, False, True]
    assert "max-connections" in refusals(without, document) & refusals(sharded, document)


ACCEPTED_SILENTLY: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("query groups without grouped attention", {"group-query-attention": None}, "query-groups-ignored"),
    ("recompute words without granularity", {"recompute-granularity": None}, "recompute-without-granularity"),
    (
        "two spellings",
        {"recompute-activations": True, "recompute-method": None, "recompute-num-layers": None},
        "recompute-stated-twice",
    ),
    ("fp32", {"bf16": None, "cross-entropy-loss-fusion": None}, "fp32-training"),
    (
        "sequence parallel with one rank",
        {"tensor-model-parallel-size": "1", "tp-comm-overlap": None},
        "sequence-parallel-needs-tp",
    ),
    ("no sequence parallelism", {"sequence-parallel": None, "tp-comm-overlap": None}, "sequence-parallel-off"),
    (
        "no sharded optimizer",
        {"use-distributed-optimizer": None, "overlap-param-gather": None},
        "distributed-optimizer-off",
    ),
)


@needs_megatron
def test_what_megatron_accepts_silently(counts: Counts) -> None:
    """Megatron runs these, slower or otherwise than they read; each has a finding."""
    document = CASES[DENSE].document
    cases = [changed(case_of(document, name), changes) for name, changes, _ in ACCEPTED_SILENTLY]
    assert not [result for result in run(cases) if not result["accepted"]]
    for case, (_, _, finding) in zip(cases, ACCEPTED_SILENTLY, strict=True):
        assert finding in refusals(case, document)
    counts(Row(target="megatron", parser=parser("megatron-core"), broken=len(cases), ours=len(cases)))
