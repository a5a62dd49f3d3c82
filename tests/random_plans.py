"""Random legal plans over the whole space of a backend, as documents that can be rendered and read back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from planner.cost.context import CostContext
from planner.render import render_plan
from planner.search.space import Group, enumerate_space
from planner.service.document import make_document, strategy_id
from planner.specs.batch import StrategyBatch
from planner.specs.convert import to_strategy
from planner.specs.plan import Plan, PlanDocument, Request, SearchReport
from planner.specs.strategy import Strategy
from tests.golden.plans import estimate
from tests.strategies import legal, machines, question

QUESTIONS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("llama-3-8b", "h100", 16, {"seq_len": 8192, "global_batch": 64}),
    ("llama-3-70b", "h100", 128, {"seq_len": 8192, "global_batch": 256}),
    ("llama-2-7b", "a100", 4, {"seq_len": 4096, "global_batch": 48}),
    ("qwen2.5-7b", "h100", 32, {"seq_len": 32768, "global_batch": 32, "precision": "fp8"}),
    ("mixtral-8x7b", "h100", 64, {"seq_len": 4096, "global_batch": 256}),
    ("deepseek-v3", "h100", 256, {"seq_len": 4096, "global_batch": 1024}),
    ("gpt3-175b", "b200", 64, {"seq_len": 2048, "global_batch": 512}),
    ("llama-3.2-1b", "h100", 8, {"seq_len": 2048, "global_batch": 24, "precision": "fp32"}),
    ("qwen3-30b-a3b", "gb200", 64, {"seq_len": 4096, "global_batch": 512}),
)
"""(model, accelerator, GPUs, job): dense and mixtures, tied and not, odd layer counts, several formats."""


def random_plans(backend: str, count: int, seed: int = 0) -> list[PlanDocument]:
    """``count`` legal plans, spread over the questions that the backend has any plan for."""
    chooser = random.Random(seed)
    open_questions = [index for index in range(len(QUESTIONS)) if _groups(backend, index)]
    plans: dict[str, PlanDocument] = {}
    while len(plans) < count:
        document = _draw(backend, chooser.choice(open_questions), chooser)
        plans.setdefault(document.best.strategy.model_dump_json(), document)
    return list(plans.values())


def corner_plans(backend: str, seed: int = 1) -> Iterator[PlanDocument]:
    """For every question, one plan with each value of each coarse column that legal plans have."""
    chooser = random.Random(seed)
    for index in range(len(QUESTIONS)):
        for group in _groups(backend, index):
            for column in ("tp", "cp", "ep", "etp", "zero_stage", "recompute_kind", "offload_device", "micro_batch"):
                values = getattr(group.batch, column)
                for value in np.unique(values):
                    row = int(chooser.choice(np.flatnonzero(values == value).tolist()))
                    yield _document(_context(backend, index), _opened(_context(backend, index), group, row, chooser))


@cache
def _context(backend: str, index: int) -> CostContext:
    model, accelerator, gpus, job = QUESTIONS[index]
    return question(model, machines(accelerator, gpus), backend, **job)


@cache
def _groups(backend: str, index: int) -> tuple[Group, ...]:
    """Legal candidates, at most some thousand of each pipeline shape."""
    context = _context(backend, index)
    space = enumerate_space(context, {})
    chooser = np.random.default_rng(index)
    groups = []
    for core in space.cores:
        kept = core.take(np.sort(chooser.permutation(len(core))[:200]))
        variants = space.variants(kept)
        if len(variants):
            groups.append(variants)
    return tuple(groups)


def _draw(backend: str, index: int, chooser: random.Random) -> PlanDocument:
    group = chooser.choice(_groups(backend, index))
    context = _context(backend, index)
    return _document(context, _opened(context, group, chooser.randrange(len(group)), chooser))


def _opened(context: CostContext, group: Group, row: int, chooser: random.Random) -> StrategyBatch:
    """One candidate with its open choices taken at random: layers of the stages, recomputed layers, offloaded share."""
    batch = group.batch.take(np.array([row]))
    layers = batch.stage_layers[0, : group.pp * group.vpp]
    if group.counted[row]:
        batch = batch.with_values(recompute_layers=np.array([chooser.randint(1, int(layers.max()))]))
    if group.steps[row]:
        steps = int(group.steps[row])
        batch = batch.with_values(offload_optimizer=np.array([chooser.randint(1, steps) / steps]))
    if group.free and group.vpp == 1 and group.pp > 1 and chooser.random() < 0.5:
        uneven = batch.with_values(stage_layers=np.array([_uneven(layers.tolist(), chooser)]))
        return uneven if not legal(context, uneven) else batch
    return batch


def _uneven(layers: list[int], chooser: random.Random) -> list[int]:
    """One layer moved from one stage to another."""
    give, take = chooser.sample(range(len(layers)), 2)
    if layers[give] > 1:
        layers[give] -= 1
        layers[take] += 1
    return layers


def _document(context: CostContext, batch: StrategyBatch) -> PlanDocument:
    """The plan document of a one-row batch."""
    return plan_document(context, to_strategy(batch, 0, context.recompute_kinds, context.job))


def configuration_files(document: PlanDocument, launcher: str = "torchrun") -> dict[str, str]:
    """What is rendered for the framework and its launcher, without plan and guide."""
    files = render_plan(document, launcher=launcher)
    return {name: text for name, text in files.items() if name not in ("plan.json", "README.md")}


def plan_document(context: CostContext, strategy: Strategy) -> PlanDocument:
    """A document that can be rendered; its figures are round, for only the guide prints them."""
    request = Request(model=context.model, cluster=context.cluster, job=context.job, backend=context.backend.name)
    plan = Plan(backend=context.backend.name, strategy=strategy, estimate=estimate())
    return make_document(request, plan, SearchReport(status="estimated"), identity=strategy_id(request, plan))
