"""torchtitan's own parser, meshes and parallelisation accept every rendered plan and hold the parameters that we count;
what they refuse, our rules or the reader refuse too."""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner.catalog import load_model
from planner.cost.params import embedding_params, head_params, layer_params, mtp_params, total_params
from planner.reading import read_configuration
from planner.render import render_plan
from planner.specs.convert import to_strategy
from planner.specs.model import ModelSpec
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Strategy
from tests.parsers.conftest import Counts
from tests.parsers.interpreter import PYTHON, lacking, parser
from tests.parsers.matrix import Row
from tests.random_plans import corner_plans, plan_document, random_plans
from tests.strategies import legal, machines, question, strategy

pytestmark = pytest.mark.parsers

RUNNER = Path(__file__).with_name("run_torchtitan.py")
RANDOM_PLANS, CORNER_PLANS = 35, 25
SHOW_WORDS = 'set -eu; source ./torchtitan_args.sh; printf "%s\\0" "${TORCHTITAN_ARGS[@]}"'


@pytest.fixture(autouse=True)
def _framework() -> None:
    if absent := lacking("torch", "torchtitan", "torchao"):
        pytest.skip(absent)


Asked = tuple[tuple[Any, ...], dict[str, Any]]
"""Model, GPUs and job, and the degrees."""


@dataclass
class Case:
    """Rendered files and which ranks are built."""

    document: PlanDocument
    ranks: tuple[int, ...] = (0,)
    gpus: int | None = None
    extra: tuple[str, ...] = ()
    """Words after those of the plan."""
    without: tuple[str, ...] = ()
    """Words of the plan that are left out."""


def run(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """torchtitan's answers, in order; all cases in one process."""
    lines = []
    for index, case in enumerate(cases):
        place = folder / str(index)
        place.mkdir()
        for name, text in render_plan(case.document).items():
            (place / name).write_text(text)
        shown = subprocess.run(["bash", "-c", SHOW_WORDS], cwd=place, capture_output=True, check=True, env={})
        words = [word for word in shown.stdout.decode().split("\0")[:-1] if word not in case.without]
        gpus = case.gpus or case.document.best.strategy.gpus
        line = {"name": str(index), "folder": str(place), "arguments": [*words, *case.extra], "gpus": gpus}
        lines.append(json.dumps({**line, "ranks": case.ranks}))
    done = subprocess.run([PYTHON, str(RUNNER)], input="\n".join(lines), capture_output=True, text=True, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(cases), done.stderr[-2000:]
    return answers


def planned(
    model: str | ModelSpec, gpus: int, job: dict[str, Any], *, illegal: str = "", **columns: Any
) -> PlanDocument:
    """A plan of stated degrees; ``illegal`` names the one rule that it breaks."""
    context = question(model, machines("h100", gpus), "torchtitan", **{"seq_len": 8192, "global_batch": 512, **job})
    batch = strategy(context, **columns)
    broken = legal(context, batch)
    assert illegal in broken if illegal else not broken, broken
    return plan_document(context, to_strategy(batch, 0, context.recompute_kinds, context.job))


def parameters(model: ModelSpec) -> int:
    """All trained parameters; the balancing biases of experts are buffers in torchtitan."""
    moe = model.moe
    biases = moe.experts * (sum(mlp == "moe" for _, mlp in model.layer_kinds()) + model.mtp_layers) if moe else 0
    return total_params(model) + mtp_params(model) - (biases if moe and moe.expert_bias else 0)


def rank_layers(s: Strategy, rank: int) -> list[int]:
    """Layers of the chunks of a rank; pipeline ranks are the slowest axis."""
    place = rank // (s.gpus // s.pp)
    return [s.layers_per_stage[chunk * s.pp + place] for chunk in range(s.vpp)]


def test_random_and_corner_plans_are_accepted(tmp_path: Path, counts: Counts) -> None:
    """Parser, degrees, meshes, model, stages and parallelisation of one rank of each plan: no refusal, all parameters,
    the layers and the batch of the plan."""
    corners = list(corner_plans("torchtitan"))
    documents = [*random_plans("torchtitan", RANDOM_PLANS, 5), *corners[:: max(1, len(corners) // CORNER_PLANS)]]
    chooser = random.Random(0)
    cases = [Case(document, (chooser.randrange(document.best.strategy.gpus),)) for document in documents]
    refused = []
    for case, answer in zip(cases, run(cases, tmp_path), strict=True):
        s, model = case.document.best.strategy, case.document.request.model
        if not answer["ok"]:
            refused.append((answer["stage"], answer["error"], s))
            continue
        assert answer["total"] == parameters(model)
        assert answer["stages"][str(case.ranks[0])] == rank_layers(s, case.ranks[0])
        read = answer["read"]
        shard = s.shard_degree // s.cp
        assert (read["dp_replicate"], read["dp_shard"]) == (s.dp // shard, shard)
        assert (read["grad_accum"], read["seq_len"], read["compile"]) == (s.grad_accum, s.seq_len, True)
        kinds = {"none": "NoneType", "selective": "SelectiveAC.Config", "full": "FullAC.Config"}
        assert read["recompute"] == kinds[s.recompute.mode]
    counts(Row(target="torchtitan", parser=parser("torchtitan"), plans=len(cases), refused=len(refused)))
    assert not refused


def expected_on(document: PlanDocument, rank: int) -> float:
    """Parameters that we count on a rank: tensor and expert split, then the shards."""
    s, model = document.best.strategy, document.request.model
    kinds = model.layer_kinds()
    starts = [sum(s.layers_per_stage[:stage]) for stage in range(len(s.layers_per_stage))]
    place, dense, expert = rank // (s.gpus // s.pp), 0.0, 0.0
    for stage in range(place, s.pp * s.vpp, s.pp):
        for kind in kinds[starts[stage] : starts[stage] + s.layers_per_stage[stage]]:
            layer = layer_params(model, kind)
            split = layer.attention_sharded + layer.mlp_sharded + layer.shared_expert
            biases = layer.experts if model.moe and model.moe.expert_bias else 0
            dense += split / s.tp + layer.attention_replicated + layer.router - biases + layer.norms
            expert += layer.experts * layer.expert_sharded_one / (s.ep * s.etp)
        if stage == 0:
            dense += embedding_params(model) / s.tp
        if stage == s.pp * s.vpp - 1:
            dense += head_params(model) / s.tp + model.hidden
    spread = s.shard_degree * s.tp // (s.ep * s.etp)
    return dense / s.shard_degree + expert / (spread if s.zero_stage else 1)


def without_prediction(name: str) -> ModelSpec:
    return load_model(name).spec.model_copy(update={"mtp_layers": 0})


SHARDED: dict[str, Any] = {"zero_stage": 3, "sequence_parallel": True}
PARAMETERS: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = {
    "dense": (("llama-3-70b", 128, {}), {"tp": 8, **SHARDED}, (0, 127)),
    "pipeline": (("llama-3-70b", 128, {}), {"tp": 8, "pp": 4, **SHARDED}, (0, 40, 127)),
    "chunks": (("llama-3-70b", 128, {}), {"tp": 4, "pp": 4, "vpp": 2, **SHARDED}, (0, 127)),
    "hybrid": (("llama-3-8b", 32, {}), {"zero_stage": 2, "shard_degree": 8}, (0, 31)),
    "replicated": (("llama-3-8b", 32, {}), {"tp": 4, "zero_stage": 0, "sequence_parallel": True}, (0, 31)),
    "context": (("llama-3-8b", 32, {"seq_len": 65536}), {"cp": 4, "zero_stage": 3}, (0, 31)),
    "tied": (("llama-3.2-1b", 16, {}), {"tp": 4, **SHARDED}, (0, 15)),
    "experts": (("qwen3-30b-a3b", 64, {"seq_len": 4096}), {"ep": 8, "zero_stage": 3}, (0, 63)),
    "experts over tensor ranks": (("qwen3-30b-a3b", 64, {}), {"tp": 4, "ep": 8, **SHARDED}, (0, 63)),
    "split experts": (("qwen3-30b-a3b", 64, {}), {"tp": 4, "etp": 4, **SHARDED}, (0, 63)),
    "replicated experts": (("qwen3-30b-a3b", 64, {}), {"tp": 4, "ep": 4, "sequence_parallel": True}, (0, 63)),
    "mixtral": (("mixtral-8x7b", 64, {}), {"tp": 2, "ep": 8, "pp": 4, **SHARDED}, (0, 63)),
    "latent": (("deepseek-v2-lite", 64, {"seq_len": 4096}), {"ep": 8, "zero_stage": 3}, (0, 63)),
    "671B": ((without_prediction("deepseek-v3"), 256, {"seq_len": 4096}), {"tp": 4, "ep": 64, **SHARDED}, (0, 255)),
}
"""Plans whose every matrix divides evenly, so that counts are exact."""


def test_ranks_hold_the_parameters_we_count(tmp_path: Path, counts: Counts) -> None:
    """The parameters of first, middle and last ranks, one by one."""
    cases = [Case(planned(*asked, **columns), ranks) for asked, columns, ranks in PARAMETERS.values()]
    for name, case, answer in zip(PARAMETERS, cases, run(cases, tmp_path), strict=True):
        assert answer["ok"], (name, answer)
        for rank in case.ranks:
            assert answer["held"][str(rank)] == expected_on(case.document, rank), (name, rank)
    ranks = sum(len(case.ranks) for case in cases)
    counts(Row(target="torchtitan", parser=parser("torchtitan"), ranks=ranks))


def test_a_known_count(tmp_path: Path) -> None:
    """70B over 128 ranks is a 128th of 70,553,706,496 on each."""
    (answer,) = run([Case(planned("llama-3-70b", 128, {}, tp=8, **SHARDED))], tmp_path)
    assert answer["held"]["0"] == 551_272_960


def test_prediction_blocks_run_without_pipeline(tmp_path: Path) -> None:
    """DeepSeek-V3 with its prediction block: 683 billion parameters, loss over all logits."""
    job = {"seq_len": 4096, "loss": "eager"}
    document = planned("deepseek-v3", 256, job, tp=4, ep=64, **SHARDED)
    (answer,) = run([Case(document)], tmp_path)
    assert answer["ok"], answer
    assert answer["total"] == parameters(document.request.model)
    assert answer["read"]["loss"] == "MTPLoss.Config"


STRATEGIES: dict[str, Asked] = {
    "kv-heads-over-tp": (("llama-3-70b", 128, {}), {"tp": 16, **SHARDED}),
    "heads-over-tp": ((load_model("llama-3-8b").spec.model_copy(update={"heads": 24}), 96, {}), {"tp": 16, **SHARDED}),
    "sequence-divides": (("llama-3-8b", 32, {"seq_len": 8200}), {"tp": 8, "cp": 2, **SHARDED}),
    "tied-embedding-pipeline": (("llama-3.2-1b", 16, {}), {"pp": 2, "zero_stage": 3}),
    "pipeline-filled": (("llama-3-8b", 32, {"global_batch": 16}), {"pp": 4, "zero_stage": 3}),
    "interleaved-rounds": (("llama-3-8b", 32, {"global_batch": 72}), {"pp": 4, "vpp": 2, "zero_stage": 3}),
    "expert-ranks": (("qwen3-30b-a3b", 32, {}), {"ep": 64, "zero_stage": 3}),
    "expert-rows": (("qwen3-30b-a3b", 512, {}), {"zero_stage": 3}),
    "prediction-blocks": (("deepseek-v3", 256, {"seq_len": 4096, "loss": "eager"}), {"pp": 2, "ep": 8, **SHARDED}),
    "world-size": (("llama-3-8b", 32, {}), {"tp": 8, "dp": 2, **SHARDED}),
}
"""A strategy that breaks each rule which torchtitan or torch enforces before the first step."""

BY_OURS_ALONE: dict[str, Asked] = {
    # Raised by the first step, in the loss.
    "loss-in-chunks": (("llama-3-8b", 32, {"seq_len": 4100}), {"zero_stage": 3}),
    # Experts are dealt unevenly, and the dispatcher counts them as if they were even.
    "experts-over-ep": (("qwen3-30b-a3b", 96, {"global_batch": 96}), {"ep": 3, "zero_stage": 3}),
    # A pipeline that keeps its weights, asked for twice.
    "pipeline-sharding": (("llama-3-8b", 32, {}), {"pp": 4, "zero_stage": 2}),
}
"""What torchtitan accepts without a word and our rules refuse."""


def test_illegal_strategies_are_refused_by_both(tmp_path: Path, counts: Counts) -> None:
    """Rendered all the same, torchtitan's own code refuses each."""
    cases = []
    for rule, (asked, columns) in STRATEGIES.items():
        document = planned(*asked, illegal=rule, **columns)
        if rule == "world-size":
            # The renderer itself refuses strategies that do not fill the cluster, so the cluster is larger here.
            document = planned("llama-3-8b", 16, {}, tp=8, dp=2, **SHARDED)
        cases.append(Case(document, gpus=32 if rule == "world-size" else None))
    accepted = [rule for rule, answer in zip(STRATEGIES, run(cases, tmp_path), strict=True) if answer["ok"]]
    assert not accepted
    counts(Row(target="torchtitan", parser=parser("torchtitan"), broken=len(cases), both=len(cases)))


def test_what_torchtitan_does_not_notice(tmp_path: Path, counts: Counts) -> None:
    """Our rules refuse more; if torchtitan begins to refuse these before the first step, this says so."""
    cases = [Case(planned(*asked, illegal=rule, **columns)) for rule, (asked, columns) in BY_OURS_ALONE.items()]
    assert [answer["ok"] for answer in run(cases, tmp_path)] == [True] * len(cases)
    counts(Row(target="torchtitan", parser=parser("torchtitan"), broken=len(cases), ours=len(cases)))


PIPELINE: Asked = (("llama-3-8b", 32, {}), {"pp": 4, "zero_stage": 3})
PLAIN: Asked = (("llama-3-8b", 32, {}), {"tp": 4, **SHARDED})
FILES: dict[str, tuple[Asked, dict[str, Any]]] = {
    "unknown-field": (PLAIN, {"extra": ("--parallelism.zero_stage", "3")}),
    "value-type": (PLAIN, {"extra": ("--training.seq_len", "eight")}),
    "degree": (PLAIN, {"extra": ("--parallelism.context_parallel_degree", "0")}),
    "cuda-graphs": (PIPELINE, {"without": ("--training.disable_cuda_graphs",)}),
    "local-batch": (PIPELINE, {"extra": ("--parallelism.pipeline_parallel_microbatch_size", "3")}),
    "batch-divisible": (PLAIN, {"extra": ("--training.global_batch_size", "500")}),
    "async-tensor-parallel": (
        PLAIN,
        {"extra": ("--compile.no-enable", "--compile.enable_async_tensor_parallel")},
    ),
    "pipeline-schedule": (PIPELINE, {"extra": ("--parallelism.pipeline_parallel_schedule", "1F2B")}),
    "world-size": (
        PLAIN,
        {
            "extra": (
                "--parallelism.data_parallel_replicate_degree",
                "3",
                *("--parallelism.data_parallel_shard_degree", "-1"),
            )
        },
    ),
    "registry-missing": (PLAIN, {"without": ("--module", "plan_config")}),
    "recompute-choice": (PLAIN, {"extra": ("activation-checkpoint:everything",)}),
}
"""Changed arguments: the finding of the reader, the plan, and the change."""


def test_broken_arguments_are_refused_by_both(tmp_path: Path, counts: Counts) -> None:
    """The reader names every one of them, torchtitan refuses every one of them."""
    cases = [Case(planned(*asked, **columns), **change) for (asked, columns), change in FILES.values()]
    for name, case, answer in zip(FILES, cases, run(cases, tmp_path), strict=True):
        assert not answer["ok"], (name, answer)
        found = [finding.id for finding in read_back(case).findings if finding.severity == "error"]
        assert name in found, (name, found)
    counts(Row(target="torchtitan", parser=parser("torchtitan"), broken=len(cases), both=len(cases)))


def read_back(case: Case) -> Any:
    """What the reader says of the changed files."""
    files = {name: text for name, text in render_plan(case.document).items() if name not in ("plan.json", "README.md")}
    lines = []
    for line in files["torchtitan_args.sh"].splitlines():
        words = line.split()
        kept = [word for word in words if word not in case.without]
        lines.append(" ".join(kept) if words and words[0] in ("--module", *case.without) else line)
    text = "\n".join(lines).rstrip().removesuffix(")")
    files["torchtitan_args.sh"] = f"{text}\n  {' '.join(case.extra)}\n)\n"
    return read_configuration(files)
