"""What accelerate's configuration and the Hugging Face Trainer cannot hold of an FSDP2 or a DeepSpeed plan.

Each limit was read in accelerate 1.15 and transformers 5.23; the rules of the step itself stay those of the parent.
"""

from __future__ import annotations

import numpy as np

from planner.backends.base import Rule, RuleContext
from planner.backends.rule_kit import input_rule, predicate
from planner.specs.batch import BoolArray

PARALLELISM = "accelerate/parallelism_config.py (1.15)"

NO_TENSOR_PARALLEL = predicate(
    "no-tensor-parallel",
    lambda c: c.batch.tp == 1,
    lambda c, i: f"tp({c.batch.tp[i]}), must be 1",
    reason=(
        "A model that transformers 5 loads split over tensor-parallel ranks is never wrapped in FSDP2 by the Trainer, "
        "and accelerate's own path imports a class that transformers 5 no longer has."
    ),
    source=(
        "accelerate/accelerator.py Accelerator._prepare_tp (1.15); "
        "transformers/trainer.py is_distributed_loading_by_transformers (5.23)"
    ),
    vary="tp",
)

SHARD_GROUP = predicate(
    "shard-group",
    lambda c: c.batch.shard_degree > 1,
    lambda c, i: f"shard_degree({c.batch.shard_degree[i]}) with zero_stage({c.batch.zero_stage[i]}), must be above 1",
    reason="FSDP2 starts only where the mesh has a dimension to shard over: dp_shard_size or cp_size above 1.",
    source=f"{PARALLELISM}, ParallelismConfig._validate_accelerator",
    vary="shard_degree",
)


def _replicas_shard(context: RuleContext) -> BoolArray:
    batch = context.batch
    whole = batch.shard_degree == batch.dp * batch.cp
    return np.asarray((batch.cp == 1) | whole | (batch.shard_degree > batch.cp), dtype=np.bool_)


REPLICAS_WITH_CONTEXT = predicate(
    "replicas-with-context",
    _replicas_shard,
    lambda c, i: (
        f"cp({c.batch.cp[i]}) with dp({c.batch.dp[i]}) replicas and shard_degree({c.batch.shard_degree[i]}) gives "
        "dp_replicate_size above 1 and dp_shard_size 1"
    ),
    reason="Context parallelism composes with replicas only where each of them shards over data-parallel ranks too.",
    source=f"{PARALLELISM}, ParallelismConfig.__post_init__",
    vary="shard_degree",
)

NO_PIPELINE = predicate(
    "no-pipeline",
    lambda c: c.batch.pp == 1,
    lambda c, i: f"pp({c.batch.pp[i]}), must be 1",
    reason="DeepSpeed gets the whole model from accelerate; a PipelineModule never passes through its prepare call.",
    source="accelerate/accelerator.py Accelerator._prepare_deepspeed, pipeline_parallel_rank (1.15)",
    vary="pp",
)

EAGER_ALIBI = input_rule(
    "alibi-attention",
    lambda c: not (c.job.flash_attention and c.model.position == "alibi"),
    lambda c: f"flash_attention({c.job.flash_attention}) with position {c.model.position}",
    reason="The models with ALiBi compute their scores step by step; loading them with a fused attention is refused.",
    source="transformers/models/bloom, transformers/models/mpt (no _supports_sdpa, 5.23)",
    allowed="flash_attention false (--no-flash-attention)",
)

FSDP_RULES: tuple[Rule, ...] = (NO_TENSOR_PARALLEL, SHARD_GROUP, REPLICAS_WITH_CONTEXT, EAGER_ALIBI)
DEEPSPEED_RULES: tuple[Rule, ...] = (NO_PIPELINE, EAGER_ALIBI)
