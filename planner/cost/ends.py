"""Time that the two ends of the pipeline add to a micro-batch: embedding on the first rank; head, loss and prediction
blocks on the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost import traffic
from planner.cost.collectives import SECONDS, Measure
from planner.cost.context import Work
from planner.cost.gemm import linear_s
from planner.cost.groups import Groups
from planner.cost.layers import LayerTime, Term
from planner.specs.batch import FloatArray

_LOSS_BYTES_PER_LOGIT = {True: 8.0, False: 20.0}
"""Traffic of the loss per logit, forward and backward together: fused kernels; eager casts, softmax and gradients."""


@dataclass(frozen=True)
class EndTime:
    """Terms that the first or last rank adds to every micro-batch."""

    terms: tuple[Term, ...]

    def forward(self) -> FloatArray:
        return sum((term.forward for term in self.terms), np.zeros_like(self.terms[0].forward))

    def total(self) -> FloatArray:
        return sum((term.forward + term.backward for term in self.terms), np.zeros_like(self.terms[0].forward))


def embedding_time(work: Work, groups: Groups) -> EndTime:
    """Look-up and its scatter-add; with a vocabulary-parallel table one collective each way."""
    context = work.context
    size = context.activation_bytes * context.model.hidden * work.tokens
    look_up = traffic.stream_s(work, 2.0 * size)
    scattered = 0.0 if context.job.frozen else 2.0
    terms = [Term("embedding", look_up, scattered * look_up, "rows read, written and scattered back")]
    if context.backend.habits.embedding_vocab_parallel:
        collective, back = embedding_exchanges(work, groups, SECONDS)
        terms.append(Term("embedding traffic", collective, back, "(t-1)/t S / B(S) each way", communication=True))
    return EndTime(tuple(terms))


def embedding_exchanges(work: Work, groups: Groups, measure: Measure) -> tuple[FloatArray, FloatArray]:
    """Scattered rows of a vocabulary-parallel table, and their gradients coming back (forward, backward)."""
    context = work.context
    if not context.backend.habits.embedding_vocab_parallel:
        return work.zeros(), work.zeros()
    collective = measure.all_gather(groups.tensor, context.activation_bytes * context.model.hidden * work.tokens)
    # A frozen table has no gradient to bring back.
    return collective, work.zeros() if context.job.frozen else collective


def head_time(work: Work, groups: Groups, vocab: FloatArray, block: Sequence[LayerTime]) -> EndTime:
    """Output matrix, loss, and the multi-token-prediction blocks (``block``: the layers of one) with their own pass
    through the head."""
    context = work.context
    model, habits = context.model, context.backend.habits
    # A head that is split like the embedding gathers its logits where the loss wants all of them.
    split = work.tp if habits.loss_vocab_parallel else 1.0
    head_split = work.tp if habits.embedding_vocab_parallel else split
    rate = context.dense_flops_per_s * context.constants.gemm_share
    rows = vocab / head_split * _misaligned(vocab)
    forward, backward = linear_s(
        context.constants,
        rate,
        context.stream_bytes_per_s,
        work.tokens,
        float(model.hidden),
        rows,
        frozen=context.job.frozen,
    )
    fused = habits.fused_kernels and context.job.loss != "eager"
    per_logit = habits.loss_traffic_bytes or _LOSS_BYTES_PER_LOGIT[fused]
    loss = per_logit * work.tokens * vocab / split / context.stream_bytes_per_s
    passes = 1.0 + model.mtp_layers
    terms = [
        Term("output head", passes * forward, passes * backward, "2 (M + a)(K + b)(N + a) / rate"),
        Term("loss", passes * loss / 3.0, passes * loss * 2.0 / 3.0, "bytes per logit over memory bandwidth"),
    ]
    moved, back = head_exchanges(work, groups, vocab, SECONDS)
    if habits.loss_vocab_parallel:
        terms.append(Term("head traffic", moved, back, "(t-1)/t S / B(S) each way", communication=True))
    elif habits.embedding_vocab_parallel:
        terms.append(Term("logits traffic", moved, back, "(t-1)/t S / B(S)", communication=True))
    if model.mtp_layers:
        join = linear_s(
            context.constants,
            rate,
            context.stream_bytes_per_s,
            work.tokens,
            2.0 * model.hidden,
            model.hidden / work.tp,
            frozen=context.job.frozen,
        )
        terms.append(
            Term(
                "prediction blocks",
                model.mtp_layers * sum((layer.forward() for layer in block), join[0]),
                model.mtp_layers * sum((layer.backward() for layer in block), join[1]),
                "the layers of a block and its 2h x h projection",
            )
        )
    return EndTime(tuple(terms))


def head_exchanges(work: Work, groups: Groups, vocab: FloatArray, measure: Measure) -> tuple[FloatArray, FloatArray]:
    """All passes through a head that is split (forward, backward): its input gathered where the loss is split too, else
    its logits."""
    context, habits = work.context, work.context.backend.habits
    passes = 1.0 + context.model.mtp_layers
    if habits.loss_vocab_parallel:
        full = context.activation_bytes * context.model.hidden * work.tokens
        gathered = passes * measure.all_gather(groups.tensor, full)
        return gathered, gathered
    if habits.embedding_vocab_parallel:
        return passes * measure.all_gather(groups.tensor, context.activation_bytes * vocab * work.tokens), work.zeros()
    return work.zeros(), work.zeros()


def _misaligned(vocab: FloatArray) -> FloatArray:
    """Cost factor of a vocabulary that tensor cores cannot tile (arXiv 2401.14489: padding 50257 to 50304 is worth
    about 25 %)."""
    return np.where(vocab % 8 != 0, 1.3, 1.0)
