"""Hand-made plan documents for the rendering tests: small, complete, independent of search and cost model."""

from __future__ import annotations

from typing import Any

from planner.specs.cluster import (
    Accelerator,
    Cluster,
    ComputeRates,
    DeviceMemory,
    Fabric,
    HostLink,
    Price,
)
from planner.specs.job import Job
from planner.specs.model import MlaSpec, ModelSpec, MoeSpec
from planner.specs.plan import Assumption, Breakdown, Estimate, Plan, PlanDocument, Request, SearchReport
from planner.specs.strategy import Offload, Recompute, Strategy
from planner.units import GIB

SOURCED: dict[str, Any] = {"source": ("test",), "as_of": "2026-01"}


def accelerator(name: str = "h100", architecture: str = "Hopper") -> Accelerator:
    """An accelerator with round figures."""
    return Accelerator(
        id=name,
        vendor="NVIDIA",
        architecture=architecture,
        sms=132,
        memory=DeviceMemory(advertised_bytes=80 * 10**9, allocatable_bytes=79 * GIB, bytes_per_s=3.35e12, **SOURCED),
        peak=ComputeRates(bf16=989e12, fp8=1979e12, **SOURCED),
        achieved=ComputeRates(bf16=700e12, **SOURCED),
        fabric=Fabric(kind="nvlink4", topology="switch", domain_gpus=8, bytes_per_s=450e9, **SOURCED),
        host_link=HostLink(kind="pcie5", bytes_per_s=64e9, **SOURCED),
        network_bytes_per_s=50e9,
        price=Price(**SOURCED),
        confidence="b",
    )


def cluster(gpus: int, device: Accelerator | None = None) -> Cluster:
    """Nodes of eight GPUs and eight 400 Gb/s adapters."""
    return Cluster(
        accelerator=device or accelerator(),
        gpus=gpus,
        gpus_per_node=8,
        domain_gpus=8,
        nics_per_node=8,
        nic_bytes_per_s=50e9,
        memory_bytes_per_gpu=79 * GIB,
        host_memory_bytes_per_node=2000 * GIB,
        host_cores_per_node=96,
    )


LLAMA_70B = ModelSpec(
    name="llama3-70b", layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, vocab=128256, max_seq=8192
)
LLAMA_8B = ModelSpec(
    name="llama3-8b", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256, max_seq=8192
)
DEEPSEEK_V3 = ModelSpec(
    name="deepseek-v3",
    layers=61,
    hidden=7168,
    ffn=18432,
    heads=128,
    kv_heads=128,
    head_dim=192,
    vocab=129280,
    max_seq=163840,
    attention="mla",
    mla=MlaSpec(q_lora=1536, kv_lora=512, qk_nope=128, qk_rope=64, v_head=128),
    moe=MoeSpec(experts=256, top_k=8, expert_ffn=2048, shared_ffn=2048, dense_first=3, expert_bias=True),
    mtp_layers=1,
)


def estimate() -> Estimate:
    """Round figures; rendering only prints them."""
    return Estimate(
        step_time_s=10.0,
        step_time_range_s=(9.0, 12.0),
        tokens_per_s=400_000.0,
        tokens_per_s_per_gpu=3125.0,
        model_flops_per_s_per_gpu=400e12,
        mfu=0.404,
        peak_memory_bytes=60.0 * GIB,
        peak_memory_range_bytes=(55.0 * GIB, 66.0 * GIB),
        memory_limit_bytes=78.0 * GIB,
        fits=True,
        host_memory_bytes_per_node=100.0 * GIB,
        memory=Breakdown(
            name="peak memory",
            value=60.0 * GIB,
            combine="sum",
            children=(
                Breakdown(name="weights", value=20.0 * GIB, source="test"),
                Breakdown(name="activations", value=40.0 * GIB, source="test"),
            ),
        ),
        time=Breakdown(name="step", value=10.0, source="test"),
    )


def document(
    backend: str,
    strategy: dict[str, Any],
    *,
    model: ModelSpec = LLAMA_70B,
    device: Accelerator | None = None,
    recompute: Recompute | None = None,
    offload: Offload | None = None,
) -> PlanDocument:
    """A document whose best plan has ``strategy``; batch sizes are filled in where the test does not care."""
    values = {"global_batch": 512, "seq_len": 8192, "micro_batch": 1, **strategy}
    values.setdefault("grad_accum", values["global_batch"] // (values["micro_batch"] * values.get("dp", 1)))
    chosen = Strategy(**values, recompute=recompute or Recompute(), offload=offload or Offload())
    job = Job(seq_len=chosen.seq_len, global_batch=chosen.global_batch, precision=chosen.precision)
    return PlanDocument(
        planner_version="0.0.0",
        id="0123456789abcdef" * 4,
        request=Request(model=model, cluster=cluster(chosen.gpus, device), job=job, backend=backend),
        assumptions=(Assumption(field="cluster.gpus_per_node", value=8, why="usual for this accelerator"),),
        best=Plan(
            backend=backend, strategy=chosen, estimate=estimate(), why=("The runner-up loses 4 % to pipeline bubbles.",)
        ),
        search=SearchReport(status="optimal", best_bound_s=10.0, gap=0.0, candidates=100, solved=3, seconds=0.5),
    )
