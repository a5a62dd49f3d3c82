"""Hand-made plan documents for the rendering tests: small, complete, independent of search and cost model."""

from __future__ import annotations

from dataclasses import dataclass
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


def accelerator(name: str = "h100", architecture: str = "hopper", vendor: str = "nvidia") -> Accelerator:
    """An accelerator with round figures."""
    return Accelerator(
        id=name,
        vendor=vendor,
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


@dataclass(frozen=True)
class Case:
    """A plan to render, and how."""

    document: PlanDocument
    launcher: str = "torchrun"
    hosts: tuple[str, ...] = ()


def case_names(backend: str = "") -> list[str]:
    """Names of all cases, or of those of one backend."""
    return [name for name, case in CASES.items() if not backend or case.document.best.backend == backend]


FULL = Recompute(mode="full")
SELECTIVE = Recompute(mode="selective", modules=("attention", "every-second-matmul"))
QWEN3_30B = ModelSpec(
    name="qwen3-30b-a3b",
    layers=48,
    hidden=2048,
    ffn=6144,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocab=151936,
    max_seq=40960,
    qk_norm="per_head",
    moe=MoeSpec(experts=128, top_k=8, expert_ffn=768),
)
MEGATRON_70B: dict[str, Any] = {
    "tp": 8,
    "sequence_parallel": True,
    "pp": 4,
    "pipeline_schedule": "1f1b",
    "dp": 4,
    "zero_stage": 1,
    "shard_degree": 4,
}

CASES: dict[str, Case] = {
    "megatron-dense-interleaved": Case(
        document(
            "megatron",
            MEGATRON_70B
            | {"cp": 2, "dp": 2, "vpp": 5, "pipeline_schedule": "interleaved", "layers_per_stage": (4,) * 20},
        ),
        launcher="slurm",
    ),
    "megatron-uneven-layout": Case(
        document("megatron", MEGATRON_70B | {"layers_per_stage": (19, 21, 21, 19)}),
        hosts=tuple(f"gpu-{index}.example.org" for index in range(16)),
    ),
    "megatron-moe": Case(
        document(
            "megatron",
            {
                "pp": 16,
                "pipeline_schedule": "interleaved",
                "vpp": 2,
                "layers_per_stage": (2,) * 30 + (1, 0),
                "ep": 64,
                "dp": 64,
                "zero_stage": 1,
                "shard_degree": 64,
                "seq_len": 4096,
                "global_batch": 4096,
            },
            model=DEEPSEEK_V3,
            recompute=Recompute(mode="selective", modules=("layernorm", "moe_act", "mla_up_proj")),
        )
    ),
    "megatron-recompute-block": Case(
        document(
            "megatron",
            MEGATRON_70B | {"layers_per_stage": (20,) * 4},
            recompute=Recompute(mode="full", layers_per_stage=(7,) * 4),
        )
    ),
    "megatron-offload": Case(
        document(
            "megatron",
            {"tp": 8, "sequence_parallel": True, "zero_stage": 1, "global_batch": 64},
            recompute=FULL,
            offload=Offload(optimizer=0.65, device="cpu"),
        )
    ),
    "megatron-fp8-blackwell": Case(
        document(
            "megatron",
            {"tp": 2, "sequence_parallel": True, "dp": 4, "zero_stage": 1, "shard_degree": 4, "precision": "fp8"},
            model=LLAMA_8B,
            device=accelerator("b200", "blackwell"),
        )
    ),
    "megatron-bridge-dense": Case(
        document(
            "megatron-bridge",
            MEGATRON_70B
            | {"cp": 2, "dp": 2, "vpp": 5, "pipeline_schedule": "interleaved", "layers_per_stage": (4,) * 20}
            | {"shard_degree": 4},
        ),
    ),
    "megatron-bridge-moe": Case(
        document(
            "megatron-bridge",
            {
                "pp": 16,
                "pipeline_schedule": "1f1b",
                "layers_per_stage": (4,) * 15 + (1,),
                "ep": 16,
                "dp": 16,
                "zero_stage": 1,
                "shard_degree": 16,
                "seq_len": 4096,
                "global_batch": 1024,
                "precision": "fp8",
            },
            model=DEEPSEEK_V3,
            recompute=Recompute(mode="selective", modules=("moe_act", "mla_up_proj")),
        ),
        launcher="slurm",
    ),
    "deepspeed-zero3": Case(
        document(
            "deepspeed",
            {"dp": 16, "zero_stage": 3, "shard_degree": 16, "secondary_shard_degree": 8, "micro_batch": 2},
            recompute=FULL,
        )
    ),
    "deepspeed-zero3-nvme": Case(
        document(
            "deepspeed",
            {"dp": 8, "zero_stage": 3, "shard_degree": 8},
            recompute=FULL,
            offload=Offload(optimizer=1, device="nvme", parameters="nvme"),
        )
    ),
    "deepspeed-zero2-offload": Case(
        document(
            "deepspeed",
            {"dp": 8, "zero_stage": 2, "shard_degree": 8},
            model=LLAMA_8B,
            offload=Offload(optimizer=1, device="cpu"),
        )
    ),
    "deepspeed-pipeline": Case(
        document(
            "deepspeed",
            {
                "dp": 4,
                "pp": 4,
                "pipeline_schedule": "1f1b",
                "layers_per_stage": (8,) * 4,
                "zero_stage": 1,
                "shard_degree": 4,
            },
            model=LLAMA_8B,
            recompute=FULL,
        )
    ),
    "deepspeed-ulysses": Case(
        document("deepspeed", {"dp": 2, "cp": 8, "zero_stage": 3, "shard_degree": 16}, model=LLAMA_8B, recompute=FULL)
    ),
    "deepspeed-autotp": Case(
        document("deepspeed", {"tp": 8, "dp": 2, "zero_stage": 1, "shard_degree": 2}, model=LLAMA_8B),
        launcher="slurm",
    ),
    "fsdp-full": Case(
        document("fsdp", {"dp": 64, "zero_stage": 3, "shard_degree": 64, "micro_batch": 2}, recompute=SELECTIVE)
    ),
    "fsdp-hybrid": Case(
        document(
            "fsdp",
            {"dp": 4, "cp": 4, "zero_stage": 2, "shard_degree": 8},
            model=LLAMA_8B,
            recompute=Recompute(mode="full", layers_per_stage=(12,)),
        )
    ),
    "fsdp-tensor": Case(
        document(
            "fsdp",
            {"tp": 4, "sequence_parallel": True, "dp": 2, "zero_stage": 3, "shard_degree": 2},
            model=LLAMA_8B,
            recompute=FULL,
        )
    ),
    "launch-kubernetes": Case(
        document("megatron", MEGATRON_70B | {"dp": 2, "shard_degree": 2, "layers_per_stage": (20,) * 4}),
        launcher="trainjob,pytorchjob",
    ),
    "launch-kubernetes-one-node": Case(
        document("deepspeed", {"dp": 8, "zero_stage": 3, "shard_degree": 8}, model=LLAMA_8B, recompute=FULL),
        launcher="pytorchjob,trainjob",
    ),
    "launch-hosts": Case(
        document("megatron", MEGATRON_70B | {"dp": 1, "shard_degree": 1, "layers_per_stage": (20,) * 4}),
        launcher="slurm,mpirun",
        hosts=("gpu-a", "gpu-b", "gpu-c", "gpu-d"),
    ),
    "launch-skypilot": Case(
        document(
            "fsdp",
            {"dp": 16, "zero_stage": 3, "shard_degree": 16},
            model=LLAMA_8B,
            device=accelerator("h100-sxm-80gb"),
        ),
        launcher="skypilot",
    ),
    "launch-part-of-a-node": Case(
        document("fsdp", {"dp": 4, "zero_stage": 3, "shard_degree": 4}, model=LLAMA_8B, recompute=FULL),
        launcher="slurm,trainjob,skypilot,mpirun",
    ),
    "nanotron-pipeline": Case(
        document(
            "nanotron",
            {
                "tp": 8,
                "sequence_parallel": True,
                "pp": 4,
                "pipeline_schedule": "1f1b",
                "layers_per_stage": (21, 20, 20, 19),
                "dp": 4,
                "zero_stage": 1,
                "shard_degree": 4,
            },
            recompute=FULL,
        ),
        launcher="slurm",
    ),
    "nanotron-all-forward": Case(
        document(
            "nanotron",
            {
                "tp": 2,
                "pp": 2,
                "pipeline_schedule": "gpipe",
                "layers_per_stage": (18, 14),
                "dp": 2,
                "micro_batch": 2,
                "global_batch": 64,
            },
            model=LLAMA_8B,
        )
    ),
    "nanotron-context": Case(
        document(
            "nanotron",
            {"tp": 2, "sequence_parallel": True, "cp": 4, "dp": 2, "zero_stage": 1, "shard_degree": 2},
            model=LLAMA_8B,
            recompute=FULL,
        )
    ),
    "torchtitan-dense-chunks": Case(
        document(
            "torchtitan",
            {
                "tp": 8,
                "sequence_parallel": True,
                "pp": 4,
                "vpp": 2,
                "pipeline_schedule": "interleaved",
                "layers_per_stage": (10, 11, 10, 10, 10, 10, 10, 9),
                "dp": 4,
                "zero_stage": 3,
                "shard_degree": 4,
            },
            recompute=SELECTIVE,
        ),
        launcher="slurm",
    ),
    "torchtitan-hybrid-context": Case(
        document(
            "torchtitan",
            {"dp": 4, "cp": 4, "zero_stage": 2, "shard_degree": 8, "seq_len": 32768, "global_batch": 64},
            model=LLAMA_8B,
            recompute=FULL,
        )
    ),
    "torchtitan-moe": Case(
        document(
            "torchtitan",
            {"dp": 64, "ep": 8, "zero_stage": 3, "shard_degree": 64, "micro_batch": 2, "seq_len": 4096},
            model=QWEN3_30B,
            recompute=SELECTIVE,
        )
    ),
    "torchtitan-latent-attention": Case(
        document(
            "torchtitan",
            {
                "tp": 4,
                "sequence_parallel": True,
                "dp": 64,
                "ep": 64,
                "zero_stage": 3,
                "shard_degree": 64,
                "seq_len": 4096,
                "global_batch": 1024,
            },
            model=DEEPSEEK_V3,
            recompute=FULL,
        )
    ),
    "torchtitan-fp8-offload": Case(
        document(
            "torchtitan",
            {"dp": 8, "zero_stage": 3, "shard_degree": 8, "precision": "fp8"},
            model=LLAMA_8B,
            offload=Offload(optimizer=1, device="cpu", parameters="cpu"),
        )
    ),
    "accelerate-fsdp-full": Case(
        document("accelerate-fsdp", {"dp": 64, "zero_stage": 3, "shard_degree": 64, "micro_batch": 2}, recompute=FULL),
        launcher="slurm",
    ),
    "accelerate-fsdp-hybrid": Case(
        document("accelerate-fsdp", {"dp": 4, "cp": 4, "zero_stage": 2, "shard_degree": 8}, model=LLAMA_8B)
    ),
    "accelerate-fsdp-fp8-offload": Case(
        document(
            "accelerate-fsdp",
            {"dp": 8, "zero_stage": 3, "shard_degree": 8, "precision": "fp8"},
            model=LLAMA_8B,
            offload=Offload(optimizer=1, device="cpu", parameters="cpu"),
        )
    ),
    "accelerate-deepspeed-zero3": Case(
        document(
            "accelerate-deepspeed",
            {"dp": 16, "zero_stage": 3, "shard_degree": 16, "secondary_shard_degree": 8, "micro_batch": 2},
            recompute=FULL,
        ),
        hosts=("gpu-1.example.org", "gpu-2.example.org"),
    ),
    "accelerate-deepspeed-ulysses": Case(
        document(
            "accelerate-deepspeed",
            {"dp": 2, "cp": 8, "zero_stage": 3, "shard_degree": 16},
            model=LLAMA_8B,
            recompute=FULL,
        )
    ),
    "accelerate-deepspeed-autotp": Case(
        document("accelerate-deepspeed", {"tp": 8, "dp": 2, "zero_stage": 1, "shard_degree": 2}, model=LLAMA_8B)
    ),
    "pytorch-pipeline": Case(
        document(
            "pytorch",
            {
                "tp": 4,
                "sequence_parallel": True,
                "pp": 4,
                "pipeline_schedule": "1f1b",
                "layers_per_stage": (20,) * 4,
                "dp": 8,
                "zero_stage": 3,
                "shard_degree": 8,
            },
        ),
        launcher="slurm",
    ),
    "pytorch-hybrid": Case(
        document("pytorch", {"dp": 16, "zero_stage": 2, "shard_degree": 8}, model=LLAMA_8B, recompute=FULL),
        launcher="trainjob,skypilot",
    ),
    "pytorch-experts": Case(
        document(
            "pytorch",
            {"dp": 16, "ep": 8, "zero_stage": 3, "shard_degree": 16, "seq_len": 4096},
            model=QWEN3_30B,
            recompute=SELECTIVE,
        )
    ),
}
"""Every rendered situation: the golden files and the checks of all scripts run over these."""
