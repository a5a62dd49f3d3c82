"""Parameters that one rank holds of a layer and of the two ends of the pipeline, after tensor and expert parallelism.

Data-parallel sharding is not applied here: it depends on the framework's memory layout (``Backend.state_bytes``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.cost.context import Work
from planner.cost.params import (
    LayerKind,
    head_params,
    layer_matrices,
    layer_params,
    mtp_params,
    norm_size,
    padded_vocab,
)
from planner.cost.sharding import Weights
from planner.specs.batch import FloatArray


def layer_weights(work: Work, kind: LayerKind) -> Weights:
    """Dense and expert parameters of one layer on one rank."""
    layer = layer_params(work.context.model, kind)
    split = layer.attention_sharded + layer.mixer_sharded + layer.mlp_sharded + layer.shared_expert
    whole = (
        layer.attention_replicated
        + layer.mixer_replicated
        + layer.mlp_replicated
        + layer.router
        + layer.latent
        + layer.norms
    )
    experts = layer.experts / work.batch.ep * layer.expert_sharded_one / work.etp
    adapters = _adapters(work, kind) if work.context.job.frozen else None
    return Weights(split / work.tp + whole, np.asarray(experts, dtype=float), adapters)


def _adapters(work: Work, kind: LayerKind) -> Weights:
    """Low-rank adapters beside the matrices of one layer; one for all experts of a rank, split like their matrix."""
    job, dense, expert = work.context.job, work.zeros(), work.zeros()
    for matrix in layer_matrices(work.context.model, kind):
        added = job.lora_rank * (matrix.inputs + matrix.outputs) if matrix.adapted(job.lora_targets) else 0
        if matrix.part == "expert":
            expert = expert + added / work.etp
        else:
            dense = dense + added / (work.tp if matrix.split != "none" else 1.0)
    return Weights(dense, expert)


@dataclass(frozen=True)
class Ends:
    """What the first and the last pipeline rank hold beyond their layers; on one rank both, a tied table once."""

    work: Work

    @cached_property
    def vocab(self) -> FloatArray:
        """Padded vocabulary rows."""
        habits = self.work.context.backend.habits
        split = self.work.batch.tp if habits.vocab_multiple > 1 else np.ones_like(self.work.batch.tp)
        return padded_vocab(self.work.context.model.vocab, habits.vocab_multiple * split).astype(np.float64)

    @cached_property
    def _table(self) -> FloatArray:
        model, habits = self.work.context.model, self.work.context.backend.habits
        split = self.work.tp if habits.embedding_vocab_parallel else 1.0
        return self.vocab * (model.embedding_width or model.hidden) / split

    @cached_property
    def first(self) -> Weights:
        """Embedding table, learned positions, embedding norm."""
        model = self.work.context.model
        extra = model.learned_positions * model.hidden + (norm_size(model, model.hidden) if model.embedding_norm else 0)
        return self._end(self._table + extra, self.work.zeros(), self._table)

    def _end(self, dense: FloatArray, expert: FloatArray, tables: FloatArray) -> Weights:
        """Embedding and head have no adapters: a lora job trains nothing of them."""
        none = Weights(self.work.zeros(), self.work.zeros())
        return Weights(dense, expert, none if self.work.context.job.frozen else None, tables)

    @cached_property
    def last(self) -> Weights:
        """Final norm, head (a second copy of a tied table when there are several stages) and multi-token-prediction
        blocks."""
        model, work = self.work.context.model, self.work
        table = np.where(work.batch.pp > 1, self._table, 0.0) if model.tied else self._table
        bias = head_params(model) - (0 if model.tied else model.vocab * (model.embedding_width or model.hidden))
        projections = 2 * model.embedding_width * model.hidden if model.embedding_projections else 0
        norm = norm_size(model, model.hidden) if model.final_norm else 0
        dense = table + (bias + projections) / work.tp + norm
        if not model.mtp_layers:
            return self._end(dense, work.zeros(), table)
        if not model.tied:
            # The blocks embed the next tokens: off the first stage they hold the table once more
            # (megatron/core/models/gpt/gpt_model.py, mtp_process).
            copy = np.where(work.batch.pp > 1, self._table, 0.0)
            dense, table = dense + copy, table + copy
        blocks = [layer_weights(work, kind) for kind in model.prediction_kinds()]
        inside = sum(layer_params(model, kind).total for kind in model.prediction_kinds())
        joint = mtp_params(model) - model.mtp_layers * inside
        norms = 3 * model.mtp_layers * norm_size(model, model.hidden)
        repeated = Weights(sum((b.dense for b in blocks), work.zeros()), sum((b.expert for b in blocks), work.zeros()))
        dense = dense + model.mtp_layers * repeated.dense + (joint - norms) / work.tp + norms
        return self._end(dense, model.mtp_layers * repeated.expert, table)
