"""From a job's options to its spec: sequence length, global batch and precision, with the defaults that were chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, get_args

from planner.cost.params import total_params
from planner.errors import InputError
from planner.service.inputs import checked_float, checked_int, count_with_suffix, one_of
from planner.service.requests import JobInput
from planner.specs.cluster import Accelerator, Cluster
from planner.specs.job import Job, Loss, Objective, Precision
from planner.specs.model import ModelSpec
from planner.specs.plan import Assumption
from planner.specs.problems import shown
from planner.units import count

DEFAULT_SEQ_LEN = 8192
"""Longest pre-training sequence that is assumed without being asked for (Llama 3, arXiv 2407.21783, section 3.4.1)."""
MAX_COUNT = 100_000_000
TOKENS_PER_STEP = ((30e9, 4 * 2**20), (3e9, 2 * 2**20), (0.0, 2**20))
"""(parameters from, tokens of a step): 4M is what Llama 2 (arXiv 2307.09288, table 1) and the start of Llama 3 405B
(arXiv 2407.21783, section 3.4.1) used; smaller models take less."""
TOKENS_PER_GPU_AND_STEP = 128 * 2**10
"""Few GPUs are not given the batch of a large cluster: at most this many tokens a step for each."""
WITHOUT_FLASH_ATTENTION = ("volta",)
"""Architectures older than those that FlashAttention and cuDNN's fused attention run on (FlashAttention-2: Ampere and
newer, CDNA2 and newer; github.com/Dao-AILab/flash-attention, README)."""
LEAST_TOKENS_PER_GPU_AND_STEP = 2**10
"""Many GPUs get a larger batch: Llama 3 405B took 16M tokens on 16,384 GPUs (arXiv 2407.21783, table 4)."""


@dataclass(frozen=True)
class ResolvedJob:
    job: Job
    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...]


def resolve_job(given: JobInput, model: ModelSpec, cluster: Cluster) -> ResolvedJob:
    """The job meant by the options for this model on these machines."""
    assumptions: list[Assumption] = []
    warnings: list[str] = []
    seq_len = _seq_len(given, model, assumptions)
    if seq_len > model.max_seq:
        warnings.append(
            f"seq_len {seq_len} is longer than the {model.max_seq} tokens that {model.name} was released for"
        )
    job = Job(
        seq_len=seq_len,
        global_batch=_global_batch(given, model, cluster, seq_len, assumptions),
        precision=_precision(given, cluster.accelerator, assumptions),
        loss=cast(Loss, one_of(given.loss, "--loss", get_args(Loss))),
        flash_attention=_flash_attention(given, cluster.accelerator, assumptions),
        objective=cast(Objective, one_of(given.objective, "--objective", get_args(Objective))),
        memory_margin=checked_float(given.memory_margin, "--memory-margin", 0, 0.95),
    )
    return ResolvedJob(job, tuple(assumptions), tuple(warnings))


def _seq_len(given: JobInput, model: ModelSpec, assumptions: list[Assumption]) -> int:
    if given.seq_len is not None:
        return checked_int(given.seq_len, "--seq-len", 1, MAX_COUNT)
    seq_len = min(model.max_seq, DEFAULT_SEQ_LEN)
    why = f"the model's longest sequence ({model.max_seq}), at most {DEFAULT_SEQ_LEN}"
    assumptions.append(Assumption(field="job.seq_len", value=seq_len, why=why))
    return seq_len


def _global_batch(
    given: JobInput, model: ModelSpec, cluster: Cluster, seq_len: int, assumptions: list[Assumption]
) -> int:
    if given.global_batch is None:
        sequences = default_global_batch(model, cluster.gpus, seq_len)
        why = (
            f"about {count(sequences * seq_len)} tokens a step, usual for {count(total_params(model))} parameters on "
            f"{cluster.gpus} GPUs, and divisible among them"
        )
        assumptions.append(Assumption(field="job.global_batch", value=sequences, why=why))
        return sequences
    if not isinstance(given.global_batch, str):
        return checked_int(given.global_batch, "--global-batch", 1, MAX_COUNT)
    value, tokens = count_with_suffix(given.global_batch, "--global-batch")
    sequences = _sequences(value, seq_len, given.global_batch, assumptions) if tokens else value
    return checked_int(sequences, "--global-batch", 1, MAX_COUNT)


def _sequences(tokens: int, seq_len: int, text: str, assumptions: list[Assumption]) -> int:
    """Whole sequences of a token count; "4M" means 4 x 2**20 where 4 x 10**6 does not hold whole sequences."""
    if tokens % seq_len == 0:
        return tokens // seq_len
    binary, _ = count_with_suffix(f"{text.strip()}i", "--global-batch") if text.strip()[-1:] in "kKmMgG" else (0, True)
    if binary and binary % seq_len == 0:
        why = f"{text.strip()} tokens are read as {binary}: {tokens} would not hold whole sequences of {seq_len}"
        assumptions.append(Assumption(field="job.global_batch", value=binary // seq_len, why=why))
        return binary // seq_len
    near = min(max(1, round(tokens / seq_len)), MAX_COUNT)
    raise InputError(
        f"global_batch({tokens} tokens) % seq_len({seq_len}) = {tokens % seq_len}: a step holds whole sequences",
        where="--global-batch",
        got=shown(text),
        allowed=f"a multiple of {seq_len} tokens, or a number of sequences without suffix",
        hint=f"the nearest is --global-batch {near} ({near * seq_len} tokens); 4Mi means 4 x 2**20 tokens",
    )


def default_global_batch(model: ModelSpec, gpus: int, seq_len: int) -> int:
    """Sequences of a step when nobody says: the usual token count, in a number that many dp degrees divide."""
    params = total_params(model)
    usual = next(tokens for least, tokens in TOKENS_PER_STEP if params >= least)
    usual = max(usual, gpus * LEAST_TOKENS_PER_GPU_AND_STEP)
    target = max(1, min(usual, gpus * TOKENS_PER_GPU_AND_STEP) // seq_len)
    unit = gpus
    while unit > target and unit % 2 == 0:
        unit //= 2
    if unit > target:
        return unit
    # Short sequences on very many GPUs would make more of them than a step can have.
    return max(1, min(round(target / unit), MAX_COUNT // unit)) * unit


def _flash_attention(given: JobInput, accelerator: Accelerator, assumptions: list[Assumption]) -> bool:
    if given.flash_attention and accelerator.architecture in WITHOUT_FLASH_ATTENTION:
        why = f"FlashAttention does not run on {accelerator.id}: the attention scores are materialised"
        assumptions.append(Assumption(field="job.flash_attention", value=False, why=why))
        return False
    return given.flash_attention


def supported_precisions(accelerator: Accelerator) -> tuple[str, ...]:
    """Training precisions the accelerator has matrix units for."""
    peak = accelerator.peak
    narrow = {"fp8": peak.fp8 and peak.bf16, "nvfp4": peak.fp4 and peak.bf16}
    rates = {"bf16": peak.bf16, "fp16": peak.fp16, **narrow, "fp32": peak.fp32}
    return tuple(name for name in get_args(Precision) if rates[name])


def _precision(given: JobInput, accelerator: Accelerator, assumptions: list[Assumption]) -> Precision:
    allowed = supported_precisions(accelerator)
    if given.precision is not None:
        one_of(given.precision, "--precision", get_args(Precision))
        if given.precision not in allowed:
            raise InputError(
                f"{accelerator.id} has no {given.precision} matrix units",
                where="--precision",
                got=given.precision,
                allowed=", ".join(allowed),
                hint=f"use --precision {allowed[0]}",
            )
        return cast(Precision, given.precision)
    if "bf16" in allowed:
        assumptions.append(Assumption(field="job.precision", value="bf16", why="the usual choice where it exists"))
        return "bf16"
    if "fp16" not in allowed:
        assumptions.append(
            Assumption(field="job.precision", value="fp32", why=f"{accelerator.id} has no 16-bit format")
        )
        return "fp32"
    why = f"{accelerator.id} has no bf16; fp16 needs loss scaling"
    assumptions.append(Assumption(field="job.precision", value="fp16", why=why))
    return "fp16"
