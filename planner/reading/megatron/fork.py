"""Megatron-DeepSpeed's arguments as those of Megatron-LM that mean the same.

The fork (BLOOM's among its users) keeps Megatron-LM's flags of 2021 to 2023 and leaves sharding to DeepSpeed; what only
DeepSpeed has is listed as unread, and ZeRO stage 3 is refused, since one cannot be priced as the other."""

from __future__ import annotations

from planner.errors import InputError
from planner.reading.megatron.flags import Stated
from planner.specs.finding import Finding

_VALUES = {
    "num-key-value-heads": "num-query-groups",
    "topk": "moe-router-topk",
    "expert-interval": "moe-layer-freq",
    "moe-expert-parallel-size": "expert-model-parallel-size",
    "pad-vocab-size-to": "padded-vocab-size",
    "ds-sequence-parallel-size": "context-parallel-size",
}
_SWITCHES = {
    "cpu-optimizer": "optimizer-cpu-offload",
    "use-flash-attn-v1": "use-flash-attn",
    "use-flash-attn-v2": "use-flash-attn",
    "use-flash-attn-triton": "use-flash-attn",
}
_UNREAD = {
    "partition-activations": "saved activations spread over tp",
    "checkpoint-in-cpu": "saved activations in host memory",
    "cpu-optimizer": "optimizer in host memory",
    "ds-sequence-parallel-size": "Ulysses, estimated as a ring",
    "curriculum-learning-legacy": "sequences that grow",
    "use-bnb-optimizer": "optimizer states in 8 bits",
    "mlp-type": "residual experts",
}
_ABOUT_FLAGS = ("flag-unknown", "flag-moved", "flag-deprecated", "flag-with-underscores")


def is_fork(stated: Stated) -> bool:
    """Whether the arguments start the fork: only it can be told to use DeepSpeed."""
    return "deepspeed" in stated.values


def translated(stated: Stated) -> tuple[str, ...]:
    """Turns the fork's arguments into Megatron-LM's in place, with what that leaves unread."""
    values = stated.values
    unread = [f"--{name}: {why}" for name, why in _UNREAD.items() if values.get(name) not in (None, "1", "standard")]
    for old, new in {**_VALUES, **_SWITCHES}.items():
        if old in values and new not in values:
            values[new] = values[old]
            stated.places[new] = stated.places[old]
    if "num-key-value-heads" in values:
        values["group-query-attention"] = True
    if values.get("no-pipeline-parallel"):
        values["pipeline-model-parallel-size"] = "1"
    if str(values.get("normalization", "")).lower() == "rmsnorm":
        values["normalization"] = "RMSNorm"
    if "embedding" in str(values.get("pp-partition-method", "")):
        values |= {"account-for-embedding-in-pipeline-split": True, "account-for-loss-in-pipeline-split": True}
    if values.get("position-embedding-type") == "alibi":
        # Nothing is stored or trained for it, as without positions.
        values["position-embedding-type"] = "none"
        unread.append("--position-embedding-type alibi: read as no positions")
    # It has layers of its own; fused attention only where a flag asks for it.
    values["transformer-impl"] = "local"
    _experts(stated)
    unread += _sharding(stated)
    stated.findings = [finding for finding in stated.findings if finding.id not in _ABOUT_FLAGS]
    stated.note(
        Finding(
            id="fork",
            severity="note",
            message="these arguments are Megatron-DeepSpeed's: they are priced as Megatron-LM's of the same meaning, "
            "and whether the fork knows each flag was not checked",
            where=stated.place("deepspeed"),
        )
    )
    return tuple(unread)


def _experts(stated: Stated) -> None:
    """``--num-experts`` is a list there, and 1 means a dense model."""
    counts = stated.items("num-experts")
    if len(set(counts)) == 1:
        stated.values["num-experts"] = counts[0]
    elif counts:
        stated.values["num-experts"] = max(counts, key=lambda text: (len(text), text))
        stated.described_by = f"--num-experts {' '.join(counts)}"
    if counts and set(counts) == {"1"}:
        for name in ("num-experts", "expert-model-parallel-size", "moe-router-topk", "moe-layer-freq"):
            stated.values.pop(name, None)
    elif counts:
        stated.values.setdefault("moe-router-topk", "1")
        stated.values.setdefault("moe-layer-freq", "2")


def _sharding(stated: Stated) -> list[str]:
    """The ZeRO stage as a sharded optimizer; bf16 without ZeRO shards it, too (deepspeed/runtime/bf16_optimizer.py)."""
    stage = stated.integer("zero-stage", 1, least=0)
    if stage is None:
        stated.unresolved.setdefault("use-distributed-optimizer", str(stated.values.get("zero-stage", "--zero-stage")))
        return []
    if stage == 3:
        raise InputError(
            "ZeRO stage 3 of Megatron-DeepSpeed cannot be priced as Megatron-LM",
            where=stated.place("zero-stage"),
            got="--zero-stage 3",
            allowed="--zero-stage 0, 1 or 2",
            hint="check its DeepSpeed configuration instead, with --model",
        )
    if stage or stated.values.get("bf16"):
        stated.values["use-distributed-optimizer"] = True
    return ["--zero-stage 2: gradients are sharded, too; estimated with whole gradients"] if stage == 2 else []
