"""What each framework can express, and the rules it enforces, as records for a table and JSON.

Nothing is declared here: every framework's space is walked on a few probes, so the matrix says what the search, the
checks and the renderers do."""

from __future__ import annotations

from typing import Any, cast, get_args

import numpy as np

from planner.backends import BACKENDS
from planner.backends.base import Backend
from planner.catalog import load_model
from planner.cost.context import CostContext
from planner.search.space import Group, enumerate_space
from planner.service.clusters import resolve_cluster
from planner.service.requests import ClusterInput
from planner.specs.batch import SCHEDULES
from planner.specs.cluster import Cluster
from planner.specs.job import Job, Precision

PROBES = (("llama-3-8b", 16), ("llama-2-7b", 16), ("qwen3-30b-a3b", 16))
"""(model, GPUs) on which every framework's space is walked: grouped heads, full heads, a mixture of experts."""


def list_backends(text: str = "") -> list[dict[str, Any]]:
    """One record for each framework with ``text`` in its name or title."""
    wanted = text.lower()
    return [_backend(each) for each in BACKENDS.values() if wanted in each.name or wanted in each.title.lower()]


def _backend(backend: Backend) -> dict[str, Any]:
    seen = _Seen()
    for model, gpus in PROBES:
        seen.walk(backend, model, gpus)
    return {
        "id": backend.name,
        "title": backend.title,
        "versions": backend.versions,
        "expresses": seen.expresses(backend),
        "zero_stages": sorted(seen.values["zero_stage"]),
        "pipeline_schedules": [SCHEDULES[index] for index in sorted(seen.values["schedule"]) if index],
        "recompute": sorted(seen.recompute),
        "offload": [
            {"optimizer": choice.device, "parameters": choice.parameters, "zero_stages": list(choice.zero_stages)}
            for choice in backend.offloads
        ],
        "context_parallel": backend.habits.context_parallel_comm if max(seen.values["cp"], default=1) > 1 else None,
        "rules": [
            {"id": rule.id, "reason": rule.reason, "source": rule.source, "limit": rule.limit} for rule in backend.rules
        ],
    }


class _Seen:
    """Values that legal candidates of the probes have."""

    def __init__(self) -> None:
        self.values: dict[str, set[int]] = {name: set() for name in _COLUMNS}
        self.recompute: set[str] = set()
        self.hybrid = self.secondary = self.uneven = False
        self.precisions: set[str] = set()

    def walk(self, backend: Backend, model: str, gpus: int) -> None:
        for precision in get_args(Precision):
            context = _probe(backend, model, gpus, precision)
            space = enumerate_space(context, {})
            if any(len(core) for core in space.cores):
                self.precisions.add(precision)
            if precision == "bf16":
                for core in space.cores:
                    self._take(context, space.variants(core.take(slice(None, None, max(1, len(core) // 200)))))
                    self._columns(core)

    def _columns(self, core: Group) -> None:
        batch = core.batch
        for name in _COLUMNS:
            self.values[name] |= set(np.unique(getattr(batch, name)).tolist())
        # Without context parallelism, whose ranks a framework may leave out of the shard group altogether.
        alone = (batch.zero_stage > 0) & (batch.cp == 1)
        self.hybrid |= bool((alone & (batch.shard_degree < batch.dp)).any())
        self.secondary |= bool((batch.secondary_shard_degree > 0).any())
        self.uneven |= core.free

    def _take(self, context: CostContext, group: Group) -> None:
        self.recompute |= {
            context.recompute_kinds[index].mode for index in np.unique(group.batch.recompute_kind).tolist()
        }

    def expresses(self, backend: Backend) -> dict[str, Any]:
        most = {name: max(values, default=0) > 1 for name, values in self.values.items()}
        return {
            "tp": most["tp"],
            "sequence_parallel": 1 in self.values["sequence_parallel"],
            "cp": most["cp"],
            "pp": most["pp"],
            "vpp": most["vpp"],
            "uneven_stages": self.uneven,
            "ep": most["ep"],
            "etp": most["etp"],
            "hybrid_shard": self.hybrid,
            "secondary_shard": self.secondary,
            "optimizer_offload": bool(backend.offloads),
            "parameter_offload": any(choice.parameters != "none" for choice in backend.offloads),
            "precisions": sorted(self.precisions),
        }


_COLUMNS = ("tp", "sequence_parallel", "cp", "pp", "vpp", "ep", "etp", "zero_stage", "schedule")


def _probe(backend: Backend, model: str, gpus: int, precision: str) -> CostContext:
    """The question on which a framework's space is walked."""
    job = Job(seq_len=4096, global_batch=64, precision=cast(Precision, precision))
    return CostContext(load_model(model).spec, _cluster(gpus), job, backend)


def _cluster(gpus: int) -> Cluster:
    """Blackwell has every number format; drives of its own, for what goes to NVMe."""
    cluster = resolve_cluster(ClusterInput(gpu="b200", gpus=gpus)).cluster
    return cluster.model_copy(update={"nvme_bytes_per_s": 5e9})
