"""What can be said of Megatron-LM arguments without knowing machines or memory: refused pairs, settings that do
nothing, and defaults that cost speed or memory.

Limits that every plan keeps (heads over tp, sequence over cp, ...) are the backend's rules and are not repeated here.
Sources are megatron/training/arguments.py (validate_args) and megatron/core/transformer/transformer_config.py of
megatron-core 0.19 unless named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from planner.backends.megatron_rules import FROM_BLACKWELL
from planner.reading.megatron.flags import Stated
from planner.specs.finding import Finding, Severity

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_MODULES = frozenset(
    {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out"}
)
"""What --recompute-modules takes."""


@dataclass(frozen=True)
class Setting:
    """What the checks look at."""

    stated: Stated
    tp: int
    cp: int
    pp: int
    dp: int | None
    environment: Mapping[str, str] | None
    """None where the source (a log) does not show it."""

    def on(self, name: str) -> bool:
        return bool(self.stated.values.get(name))

    def off(self, name: str) -> bool:
        """Known to be off."""
        return self.stated.switch(name) is False

    def given(self, name: str) -> bool:
        return name in self.stated.values

    @property
    def sharded_framework(self) -> str:
        """Which FSDP runs, if one does."""
        if self.on("use-megatron-fsdp"):
            return "--use-megatron-fsdp"
        return "--use-torch-fsdp2" if self.on("use-torch-fsdp2") else ""


def findings(setting: Setting, *, whole: bool = True) -> Iterator[Finding]:
    """Every finding, in the order of the list of checks; not ``whole``: only those that hold for every fork."""
    for check in _CHECKS if whole else (_batches, _positions, _dropout):
        found = check(setting)
        if found is not None:
            yield found


Check = Callable[[Setting], Finding | None]


def _found(
    setting: Setting, name: str, severity: Severity, message: str, flags: tuple[str, ...], hint: str = ""
) -> Finding:
    return Finding(id=name, severity=severity, message=message, where=setting.stated.place(*flags), hint=hint)


def _full_precision(s: Setting) -> Finding | None:
    narrow = s.on("bf16") or s.on("fp16")
    known = s.off("bf16") and (s.off("fp16") or not s.stated.complete)
    if narrow or not known:
        return None
    return _found(
        s,
        "fp32-training",
        "warning",
        "neither --bf16 nor --fp16: weights and matrix multiplications are fp32, several times slower and twice as "
        "large as bf16",
        ("bf16",),
        "add --bf16",
    )


def _sequence_parallel(s: Setting) -> Finding | None:
    if s.tp == 1 or not s.off("sequence-parallel"):
        return None
    if s.given("num-experts"):
        return _found(
            s,
            "moe-needs-sequence-parallel",
            "error",
            f"experts with tp({s.tp}) need --sequence-parallel: the first training step stops "
            "(megatron/core/transformer/moe/moe_layer.py)",
            ("sequence-parallel", "num-experts"),
            "add --sequence-parallel",
        )
    return _found(
        s,
        "sequence-parallel-off",
        "warning",
        f"tp({s.tp}) without sequence parallelism: every tp rank keeps the whole of the norms' and dropouts' "
        "activations; the traffic is the same with it",
        ("sequence-parallel",),
        "add --sequence-parallel",
    )


def _idle_sequence_parallel(s: Setting) -> Finding | None:
    if s.tp > 1 or not s.on("sequence-parallel") or not s.stated.known("tensor-model-parallel-size"):
        return None
    return _found(
        s,
        "sequence-parallel-needs-tp",
        "note",
        "--sequence-parallel has no effect with tp(1); Megatron-LM switches it off",
        ("sequence-parallel",),
    )


def _two_formats(s: Setting) -> Finding | None:
    if not (s.on("bf16") and s.on("fp16")):
        return None
    message = "--bf16 and --fp16 are both given: Megatron-LM stops with an AssertionError"
    return _found(s, "two-formats", "error", message, ("fp16", "bf16"), "keep --bf16 where the GPUs have it")


REQUIRED = ("num-layers", "hidden-size", "num-attention-heads", "max-position-embeddings", "seq-length")
"""Arguments that Megatron-LM does not start without (megatron/training/arguments.py, validate_args)."""
OTHERWISE = ("use-checkpoint-args", "yaml-cfg", "encoder-num-layers", "encoder-seq-length")
"""Where some of them may come from."""


def _required(s: Setting) -> Finding | None:
    """Only where the model is described here; a list without any of them has it from somewhere else."""
    absent = [name for name in REQUIRED if not s.given(name)]
    elsewhere = s.stated.part or s.stated.unresolved or any(s.given(name) for name in OTHERWISE)
    if not s.stated.complete or elsewhere or len(absent) in (0, len(REQUIRED)):
        return None
    flags = ", ".join(f"--{name}" for name in absent)
    verb = "is" if len(absent) == 1 else "are"
    return _found(s, "argument-missing", "error", f"{flags} {verb} not given: Megatron-LM stops", (absent[0],))


def _distributed_optimizer(s: Setting) -> Finding | None:
    alone = s.dp is not None and s.dp * s.cp == 1
    if s.sharded_framework or alone or not s.off("use-distributed-optimizer"):
        return None
    copies = f"all dp({s.dp}) * cp({s.cp}) ranks keep" if s.dp else "every data-parallel rank keeps"
    # fp32 weights are their own master copy.
    states, all_told = (8, 16) if _full_precision(s) else (12, 18)
    return _found(
        s,
        "distributed-optimizer-off",
        "warning",
        f"{copies} the whole optimizer: {states} bytes a parameter ({all_told} with weight and gradient) instead of "
        f"{states} over the group",
        ("use-distributed-optimizer",),
        "add --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    )


def _sharded_framework(s: Setting) -> Finding | None:
    """Its own id is that of the rule, which would call the framework's own option illegal."""
    whole = s.stated.text("data-parallel-sharding-strategy") in ("no_shard", "optim")
    if not s.sharded_framework or (whole and s.on("use-megatron-fsdp")):
        return None
    return _found(
        s,
        "zero-stage",
        "warning",
        f"{s.sharded_framework} shards more than the optimizer, which is read and not priced for Megatron-LM",
        (s.sharded_framework.removeprefix("--"),),
        "price the same sharding with planner estimate --backend fsdp or torchtitan",
    )


def _max_connections(s: Setting) -> Finding | None:
    if s.environment is None:
        return None
    value = s.environment.get(CONNECTIONS)
    if s.sharded_framework:
        if value != "1":
            return None
        return Finding(
            id="max-connections",
            severity="error",
            message=f"{CONNECTIONS} is 1, and {s.sharded_framework} refuses to start with it",
            where=CONNECTIONS,
            hint=f"unset {CONNECTIONS}",
        )
    if (s.tp == 1 and s.cp == 1) or value == "1" or s.on("overlap-moe-expert-parallel-comm"):
        return None
    return Finding(
        id="max-connections",
        severity="warning",
        message=f"{CONNECTIONS} is {'not set' if value is None else value}: with tp({s.tp}) and cp({s.cp}) "
        "Megatron-LM refuses to start on GPUs before Blackwell",
        where=CONNECTIONS,
        allowed="1",
        hint=f"export {CONNECTIONS}=1, unless the container or the GPUs (Blackwell and newer) make it needless",
        unless=tuple(sorted(FROM_BLACKWELL)),
    )


def _recompute_twice(s: Setting) -> Finding | None:
    granularity = s.stated.text("recompute-granularity")
    if not s.on("recompute-activations") or granularity is None:
        return None
    return _found(
        s,
        "recompute-stated-twice",
        "warning" if granularity == "full" else "note",
        f"--recompute-activations means --recompute-granularity selective and wins over {granularity}",
        ("recompute-activations",),
        "leave --recompute-activations out",
    )


def _recompute_parts(s: Setting) -> Finding | None:
    granularity = s.stated.text("recompute-granularity")
    parts = [name for name in ("recompute-method", "recompute-num-layers") if s.given(name)]
    flags = ("recompute-granularity", *parts)
    if granularity == "full" and not s.on("recompute-activations") and s.stated.complete and len(parts) < 2:
        return _found(
            s,
            "recompute-needs-method",
            "error",
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
            flags,
            "add --recompute-method uniform --recompute-num-layers 1 for every layer",
        )
    if granularity == "selective" and parts and s.stated.complete:
        return _found(
            s, "recompute-method-refused", "error", f"selective recomputation takes no --{parts[0]}", (parts[0],)
        )
    if granularity is None and s.stated.complete and parts and not s.on("recompute-activations"):
        return _found(
            s,
            "recompute-without-granularity",
            "warning",
            f"--{parts[0]} does nothing without --recompute-granularity",
            (parts[0],),
            "add --recompute-granularity full",
        )
    return None


def _recompute_modules(s: Setting) -> Finding | None:
    modules = s.stated.items("recompute-modules")
    unknown = sorted(set(modules) - _MODULES)
    if unknown:
        return Finding(
            id="recompute-modules-unknown",
            severity="error",
            message=f"--recompute-modules does not know {', '.join(unknown)}",
            where=s.stated.place("recompute-modules"),
            allowed=", ".join(sorted(_MODULES)),
        )
    granularity = s.stated.text("recompute-granularity")
    if modules and granularity != "selective" and s.stated.complete and not s.on("recompute-activations"):
        return _found(
            s,
            "recompute-modules-ignored",
            "warning",
            "--recompute-modules counts with --recompute-granularity selective only",
            ("recompute-modules",),
        )
    if "moe_act" in modules and s.off("moe-grouped-gemm"):
        return _found(
            s,
            "moe-act-needs-grouped-gemm",
            "error",
            "recomputing moe_act needs --moe-grouped-gemm",
            ("recompute-modules",),
        )
    return None


def _loss(s: Setting) -> Finding | None:
    if not s.on("cross-entropy-loss-fusion") or s.stated.text("cross-entropy-fusion-impl") != "te":
        return None
    return _found(
        s,
        "te-loss-refused",
        "error",
        "megatron-core 0.19 refuses Transformer Engine's fused cross entropy",
        ("cross-entropy-fusion-impl",),
        "write --cross-entropy-fusion-impl native",
    )


def _param_gather(s: Setting) -> Finding | None:
    if not s.on("overlap-param-gather"):
        return None
    muon = s.stated.text("optimizer") == "dist_muon"
    if s.off("use-distributed-optimizer") and not s.on("use-megatron-fsdp") and not muon:
        return _found(
            s,
            "param-gather-needs-distributed-optimizer",
            "error",
            "--overlap-param-gather has nothing to gather without the distributed optimizer and is refused",
            ("overlap-param-gather",),
            "add --use-distributed-optimizer",
        )
    if s.off("overlap-grad-reduce"):
        return _found(
            s,
            "param-gather-needs-grad-reduce",
            "error",
            "--overlap-param-gather needs --overlap-grad-reduce",
            ("overlap-param-gather",),
            "add --overlap-grad-reduce",
        )
    return None


def _reduce_overlap(s: Setting) -> Finding | None:
    if not s.off("overlap-grad-reduce") or (s.dp or 1) * s.cp == 1 or s.sharded_framework:
        return None
    return _found(
        s,
        "grad-reduce-not-overlapped",
        "warning",
        "gradients are reduced after the last backward pass, with nothing beside it",
        ("overlap-grad-reduce",),
        "add --overlap-grad-reduce"
        + (" --overlap-param-gather" if s.on("use-distributed-optimizer") and s.off("overlap-param-gather") else ""),
    )


def _offload(s: Setting) -> Finding | None:
    aware = "use-precision-aware-optimizer"
    if s.on("optimizer-cpu-offload") and s.off(aware):
        return _found(
            s,
            "offload-needs-precision-aware",
            "error",
            f"--optimizer-cpu-offload needs --{aware}",
            ("optimizer-cpu-offload",),
            f"add --{aware}",
        )
    if s.on(aware) and s.off("use-distributed-optimizer") and not s.sharded_framework:
        return _found(
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
        return _found(
            s,
            "state-format-needs-precision-aware",
            "error",
            f"--{narrow[0]} needs --{aware}",
            (narrow[0],),
            f"add --{aware}",
        )
    return None


def _expert_tensor_parallel(s: Setting) -> Finding | None:
    ep = s.stated.integer("expert-model-parallel-size", 1) or 1
    default = s.stated.complete and not s.given("expert-tensor-parallel-size")
    if not (s.given("num-experts") and default and s.tp > 1):
        return None
    return _found(
        s,
        "expert-tensor-parallel-default",
        "warning",
        f"--expert-tensor-parallel-size is not given and becomes tp({s.tp}): the experts of a layer take "
        f"etp({s.tp}) * ep({ep}) = {s.tp * ep} GPUs of every stage, and small expert matrices are cut further",
        ("expert-tensor-parallel-size", "expert-model-parallel-size", "num-experts"),
        "write --expert-tensor-parallel-size 1, and raise --expert-model-parallel-size instead",
    )


def _dispatcher(s: Setting) -> Finding | None:
    ep = s.stated.integer("expert-model-parallel-size", 1) or 1
    kind = s.stated.text("moe-token-dispatcher-type", "allgather")
    if not s.given("num-experts") or ep == 1 or kind != "allgather":
        return None
    return _found(
        s,
        "allgather-dispatcher",
        "warning",
        f"the all-gather dispatcher sends every token to all ep({ep}) ranks; it is estimated as all-to-all here",
        ("moe-token-dispatcher-type",),
        "write --moe-token-dispatcher-type alltoall (or flex with DeepEP)",
    )


def _grouped_gemm(s: Setting) -> Finding | None:
    if not s.given("num-experts") or not s.off("moe-grouped-gemm"):
        return None
    return _found(
        s,
        "experts-one-by-one",
        "warning",
        "without --moe-grouped-gemm every expert is multiplied by itself, which leaves most of the GPU idle; the "
        "estimate assumes grouped GEMM",
        ("moe-grouped-gemm", "num-experts"),
        "add --moe-grouped-gemm",
    )


def _expert_parallel(s: Setting) -> Finding | None:
    ep = s.stated.integer("expert-model-parallel-size", 1) or 1
    if ep == 1 or s.given("num-experts") or not s.stated.complete:
        return None
    return _found(
        s, "expert-parallel-needs-experts", "error", f"ep({ep}) without --num-experts", ("expert-model-parallel-size",)
    )


def _tp_overlap(s: Setting) -> Finding | None:
    if not s.on("tp-comm-overlap") or s.on("sequence-parallel") or not s.off("sequence-parallel"):
        return None
    return _found(
        s,
        "tp-overlap-needs-sequence-parallel",
        "error",
        "--tp-comm-overlap needs --sequence-parallel",
        ("tp-comm-overlap",),
        "add --sequence-parallel",
    )


def _positions(s: Setting) -> Finding | None:
    length, longest = s.stated.integer("seq-length"), s.stated.integer("max-position-embeddings")
    if length is None or longest is None or length <= longest:
        return None
    return _found(
        s,
        "sequence-beyond-positions",
        "error",
        f"--seq-length {length} is more than --max-position-embeddings {longest}",
        ("max-position-embeddings",),
        f"write --max-position-embeddings {length}",
    )


def _mask(s: Setting) -> Finding | None:
    length = s.stated.integer("seq-length") or 0
    if length < 4096 or not s.stated.complete or s.on("no-create-attention-mask-in-dataloader"):
        return None
    return _found(
        s,
        "attention-mask-in-dataloader",
        "note",
        f"the data loader makes a mask of {length} x {length} bytes ({length * length / 2**20:.0f} MiB) for every "
        "sample, which causal attention does not read",
        ("no-create-attention-mask-in-dataloader",),
        "add --no-create-attention-mask-in-dataloader",
    )


def _dropout(s: Setting) -> Finding | None:
    absent = [name for name in ("hidden-dropout", "attention-dropout") if not s.given(name)]
    if not absent or not s.stated.complete:
        return None
    return _found(
        s,
        "dropout-by-default",
        "warning",
        f"--{absent[0]} is not given, and Megatron-LM's default is 0.1: masks are kept and the model trains with "
        "dropout",
        (absent[0],),
        "write --attention-dropout 0 --hidden-dropout 0, unless dropout is wanted",
    )


def _virtual_pipeline(s: Setting) -> Finding | None:
    vpp = s.stated.integer("num-virtual-stages-per-pipeline-rank") or s.stated.integer(
        "num-layers-per-virtual-pipeline-stage"
    )
    least = 3 if s.on("no-overlap-p2p-communication") else 2
    if vpp is None or s.stated.values.get("num-virtual-stages-per-pipeline-rank") == "1" or s.pp >= least:
        return None
    return _found(
        s,
        "virtual-stages-need-pipeline",
        "error",
        f"virtual stages need at least {least} pipeline stages"
        + (" where the overlap of their traffic is switched off" if least == 3 else "")
        + f", not pp({s.pp})",
        ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"),
    )


def _torch_fsdp(s: Setting) -> Finding | None:
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
    return _found(
        s,
        "torch-fsdp2-refuses",
        "error",
        "--use-torch-fsdp2 refuses " + ", ".join(refused),
        ("use-torch-fsdp2",),
    )


def _batches(s: Setting) -> Finding | None:
    micro, whole = s.stated.integer("micro-batch-size"), s.stated.integer("global-batch-size")
    if micro is None and s.stated.complete and "micro-batch-size" not in s.stated.unresolved:
        return _found(s, "micro-batch-missing", "error", "--micro-batch-size is required", ("micro-batch-size",))
    if micro is None or whole is None or s.dp is None or whole % (micro * s.dp) == 0:
        return None
    return _found(
        s,
        "batch-divisible",
        "error",
        f"global_batch({whole}) % (micro_batch({micro}) * dp({s.dp})) = {whole % (micro * s.dp)}, must be 0",
        ("global-batch-size",),
        f"write --global-batch-size {-(-whole // (micro * s.dp)) * micro * s.dp}",
    )


_CHECKS: tuple[Check, ...] = (
    _two_formats,
    _required,
    _full_precision,
    _distributed_optimizer,
    _sharded_framework,
    _sequence_parallel,
    _idle_sequence_parallel,
    _max_connections,
    _recompute_twice,
    _recompute_parts,
    _recompute_modules,
    _loss,
    _param_gather,
    _reduce_overlap,
    _offload,
    _expert_parallel,
    _expert_tensor_parallel,
    _dispatcher,
    _grouped_gemm,
    _tp_overlap,
    _positions,
    _mask,
    _dropout,
    _virtual_pipeline,
    _torch_fsdp,
    _batches,
)
