"""The rendered FSDP2 module under torch itself: meshes, shards and checkpoints of random plans, and of broken edits.

PLANNER_PARSERS_PYTHON names an interpreter with torch; torchao is needed for fp8 plans only.  What a CPU cannot do is
left to GPUs: moving offloaded shards (CPUOffloadPolicy) and attention over context-parallel ranks happen in the forward
pass, which the fake process group of these tests does not run; tests/golden/test_fsdp_gloo.py trains on four processes.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from planner.reading import read_configuration
from planner.render import render_plan
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Recompute
from tests.golden.plans import LLAMA_8B
from tests.golden.plans import document as golden
from tests.parsers.conftest import Counts
from tests.parsers.interpreter import PYTHON, lacking, parser
from tests.parsers.matrix import Row
from tests.random_plans import corner_plans, random_plans

RUNNER = Path(__file__).with_name("run_fsdp.py")

WIDTH = 4096
SIZES = {"layers": 4, "hidden": WIDTH, "ffn": WIDTH, "heads": 64, "kv_heads": 64, "head_dim": 64, "vocab": WIDTH}
"""All widths divide by every tp * shard degree of the plans, so each rank holds the same number of parameters."""


pytestmark = [
    pytest.mark.parsers,
    pytest.mark.skipif(bool(lacking("torch")), reason=lacking("torch")),
]


def run(cases: list[list[Any]]) -> list[dict[str, Any]]:
    """The runner's answers, in the order of the cases."""
    result = subprocess.run(
        [PYTHON, str(RUNNER)],
        input=json.dumps(cases),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@cache
def plans() -> tuple[PlanDocument, ...]:
    """Plans that need no more than this interpreter has."""
    drawn = (*random_plans("fsdp", 150, seed=7), *islice(corner_plans("fsdp"), 0, None, 2))
    usable = not lacking("torchao")
    return tuple(d for d in drawn if usable or d.best.strategy.precision != "fp8")


def recomputed(document: PlanDocument) -> int | None:
    counts = document.best.strategy.recompute.layers_per_stage
    return None if counts is None else sum(counts)


def blocks(document: PlanDocument) -> int:
    """Enough blocks for those that recompute, and one more."""
    return max(SIZES["layers"], (recomputed(document) or 0) + 1)


def local_parameters(layers: int, tp: int, shard: int, *, tied: bool) -> int:
    """Matrices over tensor-parallel ranks and shards, norms over shards only."""
    matrices = layers * 7 * WIDTH * WIDTH + (1 if tied else 2) * WIDTH * WIDTH
    return matrices // (tp * shard) + (2 * layers + 1) * WIDTH // shard


def test_every_plan_parallelises_as_it_was_meant(counts: Counts) -> None:
    """Mesh, shard group, resharding, precision, checkpointed blocks and parameters of the last rank are the plan's."""
    cases = [
        [str(i), render_plan(d), {**SIZES, "layers": blocks(d)}, d.best.strategy.gpus, d.best.strategy.gpus - 1]
        for i, d in enumerate(plans())
    ]
    answers = run(cases)
    assert len(answers) == len(plans()) > 150
    for document, answer in zip(plans(), answers, strict=True):
        s, layers = document.best.strategy, blocks(document)
        assert answer["ok"], (answer, s)
        mesh = answer["mesh"]
        assert mesh["tp"] == s.tp
        assert mesh["cp"] == s.cp
        assert mesh["dp_replicate"] * mesh["dp_shard"] == s.dp
        assert mesh["dp_shard"] * s.cp == answer["shard_ranks"] == s.shard_degree
        assert answer["data_rank"] == s.dp - 1
        assert answer["reshards"] == (s.zero_stage == 3)
        assert answer["sharded_blocks"] == answer["blocks"] == layers
        expected = {"none": 0, "selective": layers, "full": recomputed(document) or layers}[s.recompute.mode]
        assert answer["checkpointed"] == expected
        assert answer["compute"] == {"fp32": "None", "fp16": "torch.float16"}.get(s.precision, "torch.bfloat16")
        assert answer["reduce"] == "torch.float32"
        tied = document.request.model.tied
        assert answer["parameters"] == local_parameters(layers, s.tp, s.shard_degree, tied=tied)
    row = {"plans": len(answers), "ranks": len(answers)}
    counts(Row(target="fsdp", parser=parser("torch"), **row))


def test_the_whole_model_of_a_plan_is_built() -> None:
    """Llama-3-8B at its own size: the rank holds its share of 8.03 billion parameters."""
    plan = golden(
        "fsdp",
        {"tp": 4, "sequence_parallel": True, "dp": 4, "zero_stage": 3, "shard_degree": 4, "global_batch": 64},
        model=LLAMA_8B,
        recompute=Recompute(mode="full"),
    )
    (answer,) = run([["8b", render_plan(plan), None, 16, 15]])
    assert answer["ok"], answer
    norms = 65 * 4096
    assert answer["parameters"] == (8_030_261_248 - norms) // 16 + norms // 4
    assert answer["checkpointed"] == 32


def edited(constant: str, value: str) -> dict[str, str]:
    """A plan over 8 GPUs with one constant of its module changed."""
    plan = golden(
        "fsdp",
        {"tp": 2, "sequence_parallel": True, "dp": 4, "zero_stage": 3, "shard_degree": 4, "global_batch": 64},
        model=LLAMA_8B,
        recompute=Recompute(mode="full", layers_per_stage=(12,)),
    )
    files = render_plan(plan)
    lines = files["parallelize.py"].splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"{constant} = "))
    lines[place] = f"{constant} = {value}"
    return {**files, "parallelize.py": "\n".join(lines) + "\n"}


BROKEN = {
    "one axis too long": ("DP_SHARD", "8", "world-size"),
    "an axis of none": ("DP_REPLICATE", "0", "wrong-type"),
    "an axis as text": ("TP", '"2"', "wrong-type"),
    "more blocks than there are": ("RECOMPUTE_LAYERS", "99", "recompute-layers"),
    "a precision of another framework": ("PRECISION", '"bfloat16"', "precision"),
}
"""Refused by torch when the module runs, and an error among our findings."""


@pytest.mark.parametrize("name", BROKEN)
def test_broken_edits_are_refused_by_both(name: str, counts: Counts) -> None:
    constant, value, finding = BROKEN[name]
    files = edited(constant, value)
    (answer,) = run([[name, files, None, 8, 0]])
    assert not answer["ok"], answer
    assert finding in {f.id for f in read_configuration(files).findings if f.severity == "error"}
    counts(Row(target="fsdp", parser=parser("torch"), broken=1, both=1))


def test_a_misspelt_recomputation_is_silently_full(counts: Counts) -> None:
    """The module takes every other word for full; our side refuses the word."""
    files = edited("RECOMPUTE", '"Selective"')
    (answer,) = run([["x", files, None, 8, 0]])
    assert answer["ok"]
    assert answer["checkpointed"] == 12
    configuration = read_configuration(files)
    assert [f.id for f in configuration.findings] == ["recompute-mode"]
    assert configuration.strategy.recompute is None
    counts(Row(target="fsdp", parser=parser("torch"), broken=1, ours=1))
