"""Hand-made models, clusters, jobs and one-row batches for tests, so that they depend on no catalogue entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner.backends.base import Backend, RuleContext
from planner.specs.batch import EVERY_LAYER, SCHEDULES, StrategyBatch
from planner.specs.cluster import Accelerator, Cluster, ComputeRates, DeviceMemory, Fabric, HostLink, Price
from planner.specs.job import Job
from planner.specs.model import BiasSpec, GdnSpec, MambaSpec, MlaSpec, ModelSpec, MoeSpec

TERA = 1e12
GB = 10**9
SOURCE: dict[str, Any] = {"source": ("test",), "as_of": "2026-01"}


def llama70b(**changes: Any) -> ModelSpec:
    """Llama-3-70B."""
    dimensions = {
        "name": "llama-70b",
        "layers": 80,
        "hidden": 8192,
        "ffn": 28672,
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 128,
        "vocab": 128256,
        "max_seq": 8192,
    }
    return ModelSpec(**{**dimensions, **changes})


def llama8b(**changes: Any) -> ModelSpec:
    """Llama-3-8B."""
    small = {"name": "llama-8b", "layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32}
    return llama70b(**{**small, **changes})


def mixtral(**changes: Any) -> ModelSpec:
    """Mixtral-8x7B: plain attention with eight experts."""
    moe = MoeSpec(experts=8, top_k=2, expert_ffn=14336)
    return llama8b(**{"name": "mixtral", "vocab": 32000, "moe": moe, **changes})


def deepseek_v3(**changes: Any) -> ModelSpec:
    """DeepSeek-V3: latent attention, 256 experts, a shared one, three dense layers, one prediction layer."""
    dimensions = {
        "name": "deepseek-v3",
        "layers": 61,
        "hidden": 7168,
        "ffn": 18432,
        "heads": 128,
        "kv_heads": 128,
        "head_dim": 192,
        "vocab": 129280,
        "max_seq": 163840,
        "attention": "mla",
        "mla": MlaSpec(q_lora=1536, kv_lora=512, qk_nope=128, qk_rope=64, v_head=128),
        "moe": MoeSpec(experts=256, top_k=8, expert_ffn=2048, shared_ffn=2048, dense_first=3, expert_bias=True),
        "mtp_layers": 1,
    }
    return ModelSpec(**{**dimensions, **changes})


def gpt13b(**changes: Any) -> ModelSpec:
    """GPT-3 13B: multi-head attention, learned positions, biases, tied embedding."""
    dimensions = {
        "name": "gpt-13b",
        "layers": 40,
        "hidden": 5120,
        "ffn": 20480,
        "heads": 40,
        "kv_heads": 40,
        "head_dim": 128,
        "vocab": 51200,
        "max_seq": 2048,
        "attention": "mha",
        "tied": True,
        "gated_mlp": False,
        "activation": "gelu",
        "bias": BiasSpec(qkv=True, out=True, mlp=True),
        "norm": "layernorm",
        "position": "learned",
        "learned_positions": 2048,
    }
    return ModelSpec(**{**dimensions, **changes})


def mamba_hybrid() -> ModelSpec:
    """A small hybrid of Mamba-2, attention and MLP blocks."""
    mamba = MambaSpec(heads=64, head_dim=64, groups=8, state=128, conv=4)
    return llama8b(name="hybrid", layers=8, pattern="M-M-*-M-", mamba=mamba, attention="hybrid")


def delta_net() -> ModelSpec:
    """A small hybrid with three gated delta nets to one attention layer."""
    gdn = GdnSpec(qk_heads=16, v_heads=32, qk_dim=128, v_dim=128, conv=4)
    return llama8b(name="delta-net", layers=8, pattern="LLL*LLL*", gdn=gdn, attention="hybrid")


def accelerator(name: str = "h100", **changes: Any) -> Accelerator:
    """An H100-like GPU; ``changes`` replace whole fields, ``peak`` takes a mapping of rates in TFLOP/s."""
    rates: dict[str, Any] = {"fp32": 67, "fp16": 989, "bf16": 989, "fp8": 1979, **changes.pop("peak", {})}
    flops: dict[str, Any] = {key: None if rate is None else rate * TERA for key, rate in rates.items()}
    peak = ComputeRates(**SOURCE, **flops)
    fields = {
        "id": name,
        "vendor": "nvidia",
        "architecture": "Hopper",
        "memory": DeviceMemory(**SOURCE, advertised_bytes=80 * GB, allocatable_bytes=85 * GB, bytes_per_s=3.35e12),
        "peak": peak,
        "achieved": peak,
        "fabric": Fabric(**SOURCE, kind="nvlink4", topology="switch", domain_gpus=8, bytes_per_s=450e9),
        "host_link": HostLink(**SOURCE, kind="pcie5", bytes_per_s=64e9),
        "network_bytes_per_s": 50e9,
        "price": Price(**SOURCE),
        "confidence": "a",
    }
    return Accelerator(**{**fields, **changes})


def b200() -> Accelerator:
    """Blackwell: fp8 and fp4."""
    return accelerator("b200", architecture="blackwell", peak={"bf16": 2250, "fp8": 4500, "fp4": 9000})


def v100() -> Accelerator:
    """A Volta GPU: fp16 only."""
    return accelerator("v100", architecture="Volta", peak={"fp32": 15.7, "fp16": 125, "bf16": None, "fp8": None})


def h100_cluster(gpus: int = 128, **changes: Any) -> Cluster:
    """H100 nodes of eight with one 400 Gb/s NIC a GPU."""
    fields = {
        "accelerator": accelerator(),
        "gpus": gpus,
        "gpus_per_node": 8,
        "domain_gpus": 8,
        "nics_per_node": 8,
        "nic_bytes_per_s": 50e9,
        "memory_bytes_per_gpu": 85 * GB,
        "host_memory_bytes_per_node": 2000 * GB,
        "host_cores_per_node": 96,
    }
    return Cluster(**{**fields, **changes})


def make_job(**changes: Any) -> Job:
    """8192 tokens, 512 sequences a step, bf16."""
    return Job(**{"seq_len": 8192, "global_batch": 512, **changes})


def make_batch(**columns: Any) -> StrategyBatch:
    """A batch from columns: a scalar makes one row (or is repeated), a list gives every row its value.

    Everything not given is off; ``schedule`` takes a schedule's name, ``stage_layers`` one row of layers or several.
    """
    layers = np.atleast_2d(np.asarray(columns.pop("stage_layers", [1]), dtype=np.int64))
    if isinstance(columns.get("schedule"), str):
        columns["schedule"] = SCHEDULES.index(columns["schedule"])
    defaults: dict[str, Any] = {
        **dict.fromkeys(("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "shard_degree", "micro_batch"), 1),
        **dict.fromkeys(("schedule", "zero_stage", "secondary_shard_degree", "recompute_kind"), 0),
        **dict.fromkeys(("offload_device", "offload_parameters"), 0),
        "recompute_layers": EVERY_LAYER,
        "sequence_parallel": False,
        "offload_optimizer": 0.0,
    }
    values = {**defaults, **columns}
    rows = max([len(np.atleast_1d(value)) for value in values.values()] + [len(layers)])
    types: dict[str, Any] = {"sequence_parallel": np.bool_, "offload_optimizer": np.float64}
    arrays = {
        name: np.array(np.broadcast_to(np.asarray(value, dtype=types.get(name, np.int64)), (rows,)))
        for name, value in values.items()
    }
    return StrategyBatch(**arrays, stage_layers=np.array(np.broadcast_to(layers, (rows, layers.shape[1]))))


@dataclass(frozen=True)
class Situation:
    """A model, machines, a job and the columns of one strategy."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    columns: Mapping[str, Any]

    def but(self, **changes: Any) -> Situation:
        """The same with another model, cluster or job, and other columns."""
        columns = {**self.columns, **{k: v for k, v in changes.items() if k not in ("model", "cluster", "job")}}
        return Situation(
            changes.get("model", self.model),
            changes.get("cluster", self.cluster),
            changes.get("job", self.job),
            columns,
        )

    def context(self, backend: Backend) -> RuleContext:
        kinds = backend.recompute_kinds(self.model, self.job)
        columns = dict(self.columns)
        if isinstance(columns.get("recompute_kind"), str):
            columns["recompute_kind"] = [kind.id for kind in kinds].index(columns["recompute_kind"])
        return RuleContext(self.model, self.cluster, self.job, make_batch(**columns), kinds)


@dataclass(frozen=True)
class RuleCase:
    """A legal situation and a change that breaks one rule."""

    rule: str
    legal: Callable[[], Situation]
    changes: Mapping[str, Any]
    says: tuple[str, ...]
    """What the equation must contain: the numbers that break the rule."""
    also: frozenset[str] = field(default_factory=frozenset)
    """Rules that cannot stay whole when this one breaks."""


def broken(backend: Backend, context: RuleContext) -> set[str]:
    """Ids of the rules that the (single) candidate breaks."""
    return {rule.id for rule, mask in backend.broken_rules(context) if mask[0]}


def check_rule_case(backend: Backend, case: RuleCase) -> None:
    """The legal situation keeps all rules; the changed one breaks this rule, says why, and no other."""
    assert broken(backend, case.legal().context(backend)) == set()
    context = case.legal().but(**case.changes).context(backend)
    assert broken(backend, context) == {case.rule} | case.also
    rule = next(rule for rule in backend.rules if rule.id == case.rule)
    equation = rule.equation(context, 0)
    for part in case.says:
        assert part in equation
    if rule.allowed is not None:
        assert rule.allowed(context, 0)
