"""Short training runs of made-up models, which show what small pieces of work cannot: what the software around them
costs the host with every kind of parallelism that this machine can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.specs.cluster import Cluster
from planner.specs.job import Job, Precision
from planner.specs.model import ModelSpec, MoeSpec
from planner.specs.strategy import Strategy
from planner.specs.validation import RunConfig, RunDevice

MICRO_BATCHES = 4
WARMUP_STEPS, MEASURED_STEPS = 2, 3


@dataclass(frozen=True)
class Size:
    """A made-up model, and the sequence that it is trained on."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    tokens: int

    def model(self, name: str, *, experts: int = 0) -> ModelSpec:
        """Dense, or a mixture of ``experts`` that are half as wide as the dense MLP."""
        return ModelSpec(
            name=name,
            layers=self.layers,
            hidden=self.hidden,
            ffn=self.ffn,
            heads=self.heads,
            kv_heads=self.heads // 2,
            head_dim=self.hidden // self.heads,
            vocab=self.vocab,
            max_seq=self.tokens,
            moe=MoeSpec(experts=experts, top_k=2, expert_ffn=self.ffn // 2) if experts else None,
        )


SIZES: dict[RunDevice, tuple[Size, ...]] = {
    "cpu": (
        Size(layers=8, hidden=96, ffn=288, heads=4, vocab=640, tokens=48),
        Size(layers=2, hidden=320, ffn=832, heads=8, vocab=1536, tokens=160),
    ),
    "cuda": (
        Size(layers=8, hidden=768, ffn=2304, heads=12, vocab=8192, tokens=512),
        Size(layers=2, hidden=3072, ffn=8192, heads=24, vocab=32_768, tokens=2048),
    ),
}
"""A deep one in which hardly anything but the host works, and a flat one that computes: what a layer costs the host is
told from what a step does."""
EXPERTS = 4


def training_runs(
    cluster: Cluster, device: RunDevice, precision: Precision, *, threads: int, quick: bool = False
) -> tuple[RunConfig, ...]:
    """Runs of as many ranks: plain and sharded data parallelism, two tensor-parallel ranks, two stages, two
    expert-parallel ranks; of the small model only where it must be ``quick``."""
    processes = cluster.gpus
    sizes = SIZES[device][:1] if quick else SIZES[device]
    runs = []
    for size, word in zip(sizes, ("small", "larger"), strict=False):
        dense, mixture = size.model(word), size.model(f"{word} mixture", experts=EXPERTS)
        runs += [(size, dense, layout) for layout in _layouts(processes)]
        if processes % 2 == 0:
            runs.append((size, mixture, {"dp": processes, "ep": 2}))
    return tuple(
        _config(cluster, device, size, model, layout, precision, threads=threads) for size, model, layout in runs
    )


def _layouts(processes: int) -> list[dict[str, Any]]:
    """Degrees that fill the processes."""
    whole: dict[str, Any] = {"dp": processes}
    if processes == 1:
        return [whole]
    found = [whole, *(whole | {"zero_stage": stage, "shard_degree": processes} for stage in (2, 3))]
    if processes % 2 == 0:
        half = processes // 2
        found += [{"dp": half, "tp": 2, "sequence_parallel": True}, {"dp": half, "pp": 2, "pipeline_schedule": "1f1b"}]
    return found


def _config(
    cluster: Cluster,
    device: RunDevice,
    size: Size,
    model: ModelSpec,
    layout: dict[str, Any],
    precision: Precision,
    *,
    threads: int,
) -> RunConfig:
    stages = layout.get("pp", 1)
    strategy = Strategy(
        micro_batch=1,
        grad_accum=MICRO_BATCHES,
        global_batch=MICRO_BATCHES * layout["dp"],
        seq_len=size.tokens,
        precision=precision,
        layers_per_stage=(size.layers // stages,) * stages,
        **layout,
    )
    return RunConfig(
        model=model,
        cluster=cluster,
        job=Job(seq_len=size.tokens, global_batch=strategy.global_batch, precision=precision),
        strategy=strategy,
        device=device,
        warmup_steps=WARMUP_STEPS,
        measured_steps=MEASURED_STEPS,
        check_gradients=False,
        threads=threads,
    )
