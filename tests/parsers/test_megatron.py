"""Megatron-LM itself reads what is rendered for it, and refuses what our rules refuse.

Its parser, validators, configurations, process groups, layer split and model run in a subprocess (run_megatron.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
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
from planner.reading.shell import launches, read_script
from planner.render import render_plan
from planner.specs.convert import from_strategy
from planner.specs.plan import PlanDocument
from tests.golden.plans import CASES, case_names
from tests.random_plans import corner_plans, random_plans

pytestmark = pytest.mark.parsers

PYTHON = os.environ.get("PLANNER_PARSERS_PYTHON", sys.executable)
RUNNER = Path(__file__).with_name("run_megatron.py")
INSTALL = "pip install --no-deps megatron-core==0.19.2 einops packaging; pip install torch"


@cache
def available() -> bool:
    """Whether that interpreter finds Megatron's training arguments, which megatron-core carries from 0.19 on."""
    probe = (
        "import sys, importlib.util as u; from pathlib import Path; s = u.find_spec('megatron'); "
        "ok = s and any((Path(p) / 'training' / 'arguments.py').is_file() for p in s.submodule_search_locations); "
        "sys.exit(0 if ok and u.find_spec('torch') and u.find_spec('einops') else 1)"
    )
    return subprocess.run([PYTHON, "-c", probe], check=False).returncode == 0


needs_megatron = pytest.mark.skipif(
    not available(), reason=f"megatron-core 0.19 with megatron.training is not importable by {PYTHON}: {INSTALL}"
)


def run(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of the cases, in their order."""
    done = subprocess.run(
        [PYTHON, str(RUNNER)],
        input="".join(json.dumps(case) + "\n" for case in cases),
        capture_output=True,
        text=True,
        check=False,
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(cases), done.stderr[-3000:]
    return results


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
