"""What Megatron-Bridge 0.6 cannot express beside what Megatron-LM refuses.

Its validate() accepts several things that fail later (chunks that do not divide, fewer micro-batches than stages);
Megatron-LM's rules, which hold here as well, refuse them before."""

from __future__ import annotations

from planner.backends.base import Rule
from planner.backends.rule_kit import input_rule

LEARNED_TABLE = input_rule(
    "learned-table",
    lambda c: c.model.position != "learned" or c.model.learned_positions == c.job.seq_len,
    lambda c: f"learned_positions({c.model.learned_positions}) with seq_len({c.job.seq_len}), must be equal",
    reason="The table of learned positions has as many rows as the training sequence has tokens.",
    source="megatron/bridge/models/gpt_provider.py (provide: max_sequence_length=self.seq_length)",
    allowed="seq_len equal to the model's learned positions",
)

PRETRAINING = input_rule(
    "pretraining-only",
    lambda c: c.job.task == "pretrain",
    lambda c: f"task {c.job.task}",
    reason="The rendered recipe trains all weights from scratch; fine-tuning has recipes bound to released models.",
    source="megatron/bridge/recipes/gpt/h100/vanilla_gpt.py",
    allowed="task in pretrain",
    limit="files",
)

BRIDGE_RULES: tuple[Rule, ...] = (LEARNED_TABLE, PRETRAINING)
