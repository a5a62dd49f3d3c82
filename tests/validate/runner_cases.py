"""Plans that the runner's tests run on four gloo processes, and the program that runs them one after the other.

``python -m torch.distributed.run ... runner_cases.py OUT CASE ...`` leaves ``OUT/rank-R.json``: for every case the
gradient check, the losses, and what an observer saw of one more step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from planner.service.clusters import resolve_cluster
from planner.service.requests import ClusterInput
from planner.specs.job import Job
from planner.specs.model import BiasSpec, MlaSpec, ModelSpec, MoeSpec
from planner.specs.strategy import Recompute, Schedule, Strategy
from planner.specs.validation import RunConfig

SEQUENCES, TOKENS, STEPS = 8, 32, 3

DENSE = ModelSpec(
    name="dense", layers=4, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=256, max_seq=TOKENS
)
ODD = DENSE.model_copy(
    update={
        "norm": "layernorm",
        "gated_mlp": False,
        "activation": "gelu",
        "bias": BiasSpec(qkv=True, out=True, mlp=True),
        "position": "learned",
        "learned_positions": TOKENS,
        "norms_per_layer": 4,
        "tied": True,
        "head_bias": True,
    }
)
NORMED = DENSE.model_copy(update={"kv_heads": 4, "qk_norm": "per_head", "tied": True, "activation": "relu2"})
MIXTURE = DENSE.model_copy(
    update={"moe": MoeSpec(experts=8, top_k=3, expert_ffn=32, shared_ffn=64, dense_first=1, shared_gate=True)}
)
LATENT = DENSE.model_copy(
    update={
        "attention": "mla",
        "kv_heads": 4,
        "head_dim": 24,
        "mla": MlaSpec(q_lora=32, kv_lora=32, qk_nope=16, qk_rope=8, v_head=16),
    }
)


def strategy(**degrees: Any) -> Strategy:
    """A strategy on the tests' global batch; one micro-batch a row unless told otherwise."""
    fields = {"layers_per_stage": (4,), "micro_batch": 1, "precision": "fp32", "seq_len": TOKENS, **degrees}
    rows = SEQUENCES // fields.get("dp", 1)
    return Strategy(**fields, grad_accum=rows // fields["micro_batch"], global_batch=SEQUENCES)


def pipeline(schedule: Schedule, **more: Any) -> Strategy:
    """Two pipeline ranks."""
    stages = (1, 1, 1, 1) if schedule == "interleaved" else (2, 2)
    return strategy(
        pp=2, vpp=len(stages) // 2, layers_per_stage=stages, pipeline_schedule=schedule, **{"dp": 2, **more}
    )


SELECTIVE = Recompute(mode="selective", modules=("attention", "every-second-matmul"))
FSDP = {"zero_stage": 3, "shard_degree": 4}
SPLIT = {"dp": 2, "tp": 2, "sequence_parallel": True}
CASES: dict[str, tuple[ModelSpec, Strategy]] = {
    "ddp": (DENSE, strategy(dp=4)),
    "fsdp": (DENSE, strategy(dp=4, **FSDP)),
    "fsdp kept": (DENSE, strategy(dp=4, zero_stage=2, shard_degree=4)),
    "hybrid": (DENSE, strategy(dp=4, zero_stage=3, shard_degree=2)),
    "odd model": (ODD, strategy(dp=4, **FSDP)),
    "full recompute": (DENSE, strategy(dp=4, **FSDP, recompute=Recompute(mode="full"))),
    "selective recompute": (DENSE, strategy(dp=4, recompute=SELECTIVE)),
    "some recompute": (DENSE, strategy(dp=4, recompute=Recompute(mode="full", layers_per_stage=(2,)))),
    "mla": (LATENT, strategy(dp=4, **FSDP)),
    "pp 1f1b": (DENSE, pipeline("1f1b")),
    "pp gpipe fsdp": (DENSE, pipeline("gpipe", zero_stage=2, shard_degree=2)),
    "pp interleaved": (DENSE, pipeline("interleaved")),
    "pp zb-h1": (DENSE, pipeline("zb-h1")),
    "pp interleaved fsdp": (DENSE, pipeline("interleaved", zero_stage=2, shard_degree=2)),
    "tp": (DENSE, strategy(**SPLIT, micro_batch=4)),
    "tp fsdp": (DENSE, strategy(**SPLIT, micro_batch=4, zero_stage=3, shard_degree=2)),
    "tp without sp": (NORMED, strategy(dp=2, tp=2, micro_batch=4)),
    "mla tp": (LATENT, strategy(**SPLIT, micro_batch=4)),
    "mla cp": (LATENT, strategy(dp=2, cp=2, micro_batch=4)),
    "cp": (DENSE, strategy(dp=2, cp=2, zero_stage=3, shard_degree=4, micro_batch=2)),
    "cp tp": (DENSE, strategy(dp=1, cp=2, tp=2, sequence_parallel=True, micro_batch=4)),
    "cp pp": (DENSE, pipeline("1f1b", dp=1, cp=2, micro_batch=2)),
    "moe cp ep2": (MIXTURE, strategy(dp=2, cp=2, ep=2, micro_batch=4)),
    "pp tp": (DENSE, pipeline("1f1b", dp=1, tp=2, sequence_parallel=True, micro_batch=2)),
    "moe ep2": (MIXTURE, strategy(dp=4, ep=2)),
    "moe ep4 fsdp": (MIXTURE, strategy(dp=4, ep=4, **FSDP)),
    "moe ep2 fsdp": (MIXTURE, strategy(dp=4, ep=2, **FSDP)),
    "moe ep1": (MIXTURE, strategy(dp=4)),
    "moe tp ep1": (MIXTURE, strategy(**SPLIT, micro_batch=4)),
    "moe tp ep2 fsdp": (MIXTURE, strategy(**SPLIT, micro_batch=4, ep=2, zero_stage=3, shard_degree=2)),
    "moe pp ep2": (MIXTURE, pipeline("1f1b", ep=2)),
    "bf16 fsdp": (DENSE, strategy(dp=4, **FSDP, precision="bf16")),
    "bf16 replicated": (DENSE, strategy(dp=4, precision="bf16")),
    "fp16": (DENSE, strategy(dp=4, zero_stage=2, shard_degree=4, precision="fp16")),
    "alone": (DENSE, strategy()),
    "alone moe": (MIXTURE, strategy()),
    "alone latent": (LATENT, strategy()),
    "alone normed": (NORMED, strategy()),
    "alone odd": (ODD, strategy()),
}


def configuration(case: str) -> RunConfig:
    """What the processes of one case are told."""
    model, chosen = CASES[case]
    job = Job(seq_len=TOKENS, global_batch=SEQUENCES, precision=chosen.precision)
    # Processors train in 16 bits, too, but plans for them are in 32.
    gpu = "cpu" if chosen.precision == "fp32" else "h100"
    return RunConfig(
        model=model,
        cluster=resolve_cluster(ClusterInput(gpu=gpu, gpus=chosen.gpus)).cluster,
        job=job,
        strategy=chosen,
        device="cpu",
        warmup_steps=1,
        measured_steps=STEPS - 1,
    )


def measure(case: str) -> dict[str, Any]:
    """Run one case in this process, which is one of its ranks."""
    from planner_validate.trainer.gradients import check_gradients
    from planner_validate.trainer.observe import Observer, summed
    from planner_validate.trainer.training import build

    config = configuration(case)
    checked = check_gradients(config)
    trainer = build(config)
    steps = [trainer.step(index) for index in range(STEPS)]
    with Observer(trainer) as observer:
        trainer.step(STEPS)
    return {
        "gradients": checked.model_dump(),
        "losses": [step.loss for step in steps],
        "norms": [step.gradient_norm for step in steps],
        "peak": observer.peak,
        "terms": observer.terms,
        "collectives": [use.model_dump() for use in summed(observer.calls, None)],
        "parameters": sum(_held(parameter) for _, parameter in trainer.named_parameters()),
    }


def _held(parameter: Any) -> int:
    return int((parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel())


def main(out: str, cases: list[str]) -> None:
    """Run the cases and leave their results."""
    import warnings

    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {case: measure(case) for case in cases}
    (Path(out) / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
