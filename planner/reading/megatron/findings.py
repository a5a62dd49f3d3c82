"""What can be said of Megatron-LM arguments without knowing machines or memory: refused pairs, settings that do
nothing, and defaults that cost speed or memory.

Limits that every plan keeps (heads over tp, sequence over cp, ...) are the backend's rules and are not repeated here.
Sources are megatron/training/arguments.py (validate_args) and megatron/core/transformer/transformer_config.py of
megatron-core 0.19 unless named."""

from __future__ import annotations

from collections.abc import Iterator

from planner.backends.megatron_rules import FROM_BLACKWELL
from planner.reading.megatron.recompute_checks import recompute_modules, recompute_parts, recompute_twice
from planner.reading.megatron.setting import CONNECTIONS, Check, Setting, found
from planner.reading.megatron.sharding_checks import (
    distributed_optimizer,
    offload,
    param_gather,
    reduce_overlap,
    sharded_framework,
    torch_fsdp,
)
from planner.specs.finding import Finding


def findings(setting: Setting, *, whole: bool = True) -> Iterator[Finding]:
    """Every finding, in the order of the list of checks; not ``whole``: only those that hold for every fork."""
    for check in _CHECKS if whole else (_batches, _positions, _dropout):
        finding = check(setting)
        if finding is not None:
            yield finding


def _full_precision(s: Setting) -> Finding | None:
    if not s.full_precision:
        return None
    return found(
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
        return found(
            s,
            "moe-needs-sequence-parallel",
            "error",
            f"experts with tp({s.tp}) need --sequence-parallel: the first training step stops "
            "(megatron/core/transformer/moe/moe_layer.py)",
            ("sequence-parallel", "num-experts"),
            "add --sequence-parallel",
        )
    return found(
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
    return found(
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
    return found(s, "two-formats", "error", message, ("fp16", "bf16"), "keep --bf16 where the GPUs have it")


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
    return found(s, "argument-missing", "error", f"{flags} {verb} not given: Megatron-LM stops", (absent[0],))


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


def _loss(s: Setting) -> Finding | None:
    if not s.on("cross-entropy-loss-fusion") or s.stated.text("cross-entropy-fusion-impl") != "te":
        return None
    return found(
        s,
        "te-loss-refused",
        "error",
        "megatron-core 0.19 refuses Transformer Engine's fused cross entropy",
        ("cross-entropy-fusion-impl",),
        "write --cross-entropy-fusion-impl native",
    )


def _expert_tensor_parallel(s: Setting) -> Finding | None:
    ep = s.stated.integer("expert-model-parallel-size", 1) or 1
    default = s.stated.complete and not s.given("expert-tensor-parallel-size")
    if not (s.given("num-experts") and default and s.tp > 1):
        return None
    return found(
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
    return found(
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
    return found(
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
    return found(
        s, "expert-parallel-needs-experts", "error", f"ep({ep}) without --num-experts", ("expert-model-parallel-size",)
    )


def _tp_overlap(s: Setting) -> Finding | None:
    if not s.on("tp-comm-overlap") or s.on("sequence-parallel") or not s.off("sequence-parallel"):
        return None
    return found(
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
    return found(
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
    return found(
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
    return found(
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
    return found(
        s,
        "virtual-stages-need-pipeline",
        "error",
        f"virtual stages need at least {least} pipeline stages"
        + (" where the overlap of their traffic is switched off" if least == 3 else "")
        + f", not pp({s.pp})",
        ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"),
    )


def _batches(s: Setting) -> Finding | None:
    micro, whole = s.stated.integer("micro-batch-size"), s.stated.integer("global-batch-size")
    if micro is None and s.stated.complete and "micro-batch-size" not in s.stated.unresolved:
        return found(s, "micro-batch-missing", "error", "--micro-batch-size is required", ("micro-batch-size",))
    if micro is None or whole is None or s.dp is None or whole % (micro * s.dp) == 0:
        return None
    return found(
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
    distributed_optimizer,
    sharded_framework,
    _sequence_parallel,
    _idle_sequence_parallel,
    _max_connections,
    recompute_twice,
    recompute_parts,
    recompute_modules,
    _loss,
    param_gather,
    reduce_overlap,
    offload,
    _expert_parallel,
    _expert_tensor_parallel,
    _dispatcher,
    _grouped_gemm,
    _tp_overlap,
    _positions,
    _mask,
    _dropout,
    _virtual_pipeline,
    torch_fsdp,
    _batches,
)
