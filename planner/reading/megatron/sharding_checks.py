"""Checks of what is sharded, gathered and moved to the host: optimizer states, gradients, weights.

Sources are those of ``findings``."""

from __future__ import annotations

from planner.reading.megatron.setting import Setting, found
from planner.specs.finding import Finding


def distributed_optimizer(s: Setting) -> Finding | None:
    if s.sharded_framework or not s.off("use-distributed-optimizer"):
        return None
    if s.dp is not None and s.dp * s.cp == 1:
        return _one_replica(s)
    copies = f"all dp({s.dp}) * cp({s.cp}) ranks keep" if s.dp else "every data-parallel rank keeps"
    # fp32 weights are their own master copy.
    states, all_told = (8, 16) if s.full_precision else (12, 18)
    return found(
        s,
        "distributed-optimizer-off",
        "warning",
        f"{copies} the whole optimizer: {states} bytes a parameter ({all_told} with weight and gradient) instead of "
        f"{states} over the group",
        ("use-distributed-optimizer",),
        "add --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    )


def _one_replica(s: Setting) -> Finding | None:
    """Worth a word only where a log says that it is off."""
    name = "use-distributed-optimizer"
    if name not in s.stated.cleared:
        return None
    message = f"--{name} is off; one replica has nothing to share, but more would keep the whole optimizer each"
    return found(s, "distributed-optimizer-off", "note", message, (name,), f"add --{name} before adding replicas")


def sharded_framework(s: Setting) -> Finding | None:
    """Its own id is that of the rule, which would call the framework's own option illegal."""
    whole = s.stated.text("data-parallel-sharding-strategy") in ("no_shard", "optim")
    if not s.sharded_framework or (whole and s.on("use-megatron-fsdp")):
        return None
    return found(
        s,
        "zero-stage",
        "warning",
        f"{s.sharded_framework} shards more than the optimizer, which is read and not priced for Megatron-LM",
        (s.sharded_framework.removeprefix("--"),),
        "price the same sharding with planner estimate --backend fsdp or torchtitan",
    )


def param_gather(s: Setting) -> Finding | None:
    if not s.on("overlap-param-gather"):
        return None
    muon = s.stated.text("optimizer") == "dist_muon"
    if s.off("use-distributed-optimizer") and not s.on("use-megatron-fsdp") and not muon:
        return found(
            s,
            "param-gather-needs-distributed-optimizer",
            "error",
            "--overlap-param-gather has nothing to gather without the distributed optimizer and is refused",
            ("overlap-param-gather",),
            "add --use-distributed-optimizer",
        )
    if s.off("overlap-grad-reduce"):
        return found(
            s,
            "param-gather-needs-grad-reduce",
            "error",
            "--overlap-param-gather needs --overlap-grad-reduce",
            ("overlap-param-gather",),
            "add --overlap-grad-reduce",
        )
    return None


def reduce_overlap(s: Setting) -> Finding | None:
    if not s.off("overlap-grad-reduce") or (s.dp or 1) * s.cp == 1 or s.sharded_framework:
        return None
    return found(
        s,
        "grad-reduce-not-overlapped",
        "warning",
        "gradients are reduced after the last backward pass, with nothing beside it",
        ("overlap-grad-reduce",),
        "add --overlap-grad-reduce"
        + (" --overlap-param-gather" if s.on("use-distributed-optimizer") and s.off("overlap-param-gather") else ""),
    )


def offload(s: Setting) -> Finding | None:
    aware = "use-precision-aware-optimizer"
    if s.on("optimizer-cpu-offload") and s.off(aware):
        return found(
            s,
            "offload-needs-precision-aware",
            "error",
            f"--optimizer-cpu-offload needs --{aware}",
            ("optimizer-cpu-offload",),
            f"add --{aware}",
        )
    if s.on(aware) and s.off("use-distributed-optimizer") and not s.sharded_framework:
        return found(
            s,
            "precision-aware-needs-distributed-optimizer",
            "error",
            f"--{aware} needs --use-distributed-optimizer",
            (aware,),
            "add --use-distributed-optimizer",
        )
    narrow = [
        n
        for n in ("exp-avg-dtype", "exp-avg-sq-dtype", "main-grads-dtype", "main-params-dtype")
        if s.stated.text(n) not in (None, "fp32", "float32")
    ]
    if narrow and s.off(aware):
        return found(
            s,
            "state-format-needs-precision-aware",
            "error",
            f"--{narrow[0]} needs --{aware}",
            (narrow[0],),
            f"add --{aware}",
        )
    return None


def torch_fsdp(s: Setting) -> Finding | None:
    if not s.on("use-torch-fsdp2"):
        return None
    refused = []
    if s.pp > 1:
        refused.append(f"pp({s.pp})")
    refused += [f"--{name}" for name in ("use-distributed-optimizer", "fp16") if s.on(name)]
    if s.off("no-gradient-accumulation-fusion"):
        refused.append("fused gradient accumulation (add --no-gradient-accumulation-fusion)")
    if s.off("untie-embeddings-and-output-weights"):
        refused.append("tied embeddings")
    if not refused:
        return None
    return found(
        s,
        "torch-fsdp2-refuses",
        "error",
        "--use-torch-fsdp2 refuses " + ", ".join(refused),
        ("use-torch-fsdp2",),
    )
