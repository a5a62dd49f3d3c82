"""``run.json`` of the validation run, as the planner writes it or edited by hand.

The file holds whole specifications, so nothing is left open and nothing is guessed.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from planner.errors import InputError
from planner.reading.configuration import Configuration, Files, StatedStrategy
from planner.reading.texts.launch_scripts import processes_per_node, wrong_world_size
from planner.specs.finding import Finding
from planner.specs.validation import RunConfig

MARKS = ("model", "job", "strategy", "device")
"""Keys that no other format has together."""


class RunConfigReader:
    """The file that the processes of ``planner_validate.trainer.worker`` read."""

    name = "pytorch-run"
    title = "validation run (run.json as written by this planner)"

    def recognises(self, files: Files) -> bool:
        return _chosen(files) is not None

    def read(self, files: Files) -> Configuration:
        name = _chosen(files) or next((name for name in files if name.endswith(".json")), None) or next(iter(files))
        config = _config(name, files[name])
        strategy, job = config.strategy, config.job
        stated = {field: getattr(strategy, field) for field in StatedStrategy.__dataclass_fields__}
        return Configuration(
            format=self.title,
            backend="pytorch",
            model=config.model,
            gpus=strategy.gpus,
            gpus_per_node=processes_per_node(files),
            seq_len=job.seq_len,
            global_batch=job.global_batch,
            precision=job.precision,
            loss=job.loss,
            flash_attention=job.flash_attention,
            task=job.task,
            strategy=StatedStrategy(**stated),
            findings=(
                *_contradictions(name, config),
                *wrong_world_size(files, "tp * cp * pp * dp", strategy.gpus, name),
            ),
        )


def _chosen(files: Files) -> str | None:
    for name, text in files.items():
        if not name.endswith(".json") or '"strategy"' not in text:
            continue
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict) and all(mark in value for mark in MARKS):
            return name
    return None


def _config(name: str, text: str) -> RunConfig:
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as problem:
        first: Any = problem.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise InputError(
            f"this is no run that can be started: {first['msg']}",
            where=f"{name}: {field}" if field else name,
            got=repr(first.get("input"))[:80],
            hint="render the plan again to see the file as the planner writes it",
        ) from problem


def _contradictions(name: str, config: RunConfig) -> list[Finding]:
    """What job and strategy both say and must agree in."""
    strategy, job = config.strategy, config.job
    pairs: dict[str, tuple[Any, Any]] = {
        "seq_len": (strategy.seq_len, job.seq_len),
        "global_batch": (strategy.global_batch, job.global_batch),
        "precision": (strategy.precision, job.precision),
    }
    found = [
        Finding(
            id="stated-twice",
            severity="error",
            message=f"strategy.{field} is {one} and job.{field} is {other}",
            where=name,
            allowed="the same value in both",
            hint=f"write {other} in both",
        )
        for field, (one, other) in pairs.items()
        if one != other
    ]
    samples = strategy.micro_batch * strategy.grad_accum * strategy.dp
    if samples != strategy.global_batch:
        found.append(
            Finding(
                id="batch-product",
                severity="error",
                message=f"micro_batch({strategy.micro_batch}) * grad_accum({strategy.grad_accum}) * dp({strategy.dp}) "
                f"= {samples}, but global_batch is {strategy.global_batch}",
                where=name,
                allowed=f"factors whose product is {strategy.global_batch}",
                hint=f"set grad_accum to {strategy.global_batch // (strategy.micro_batch * strategy.dp) or 1}",
            )
        )
    return found
