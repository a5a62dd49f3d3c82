"""A plan as nanotron's YAML configuration: every section that its trainer reads, with the plan's degrees and batch.

The loader is strict, so only keys that it knows at 2411b022 (2026-04) are written; data, checkpoints and learning rate
are placeholders that a first run can do without.
"""

from __future__ import annotations

import json

from planner.backends.nanotron_rules import needs_qwen2
from planner.errors import InputError
from planner.render.bundle import Bundle
from planner.render.engine import fill
from planner.render.launch import Launch
from planner.render.text import EXPANDABLE_SEGMENTS, Variable, one_line
from planner.render.topology import replica_ranks
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan, PlanDocument
from planner.specs.strategy import Strategy

Entry = tuple[str, str, str]
"""Key, value as YAML, remark."""

ENGINES = {"none": "1f1b", "1f1b": "1f1b", "gpipe": "afab"}
"""pp_engine of a schedule.  Without stages it is 1f1b all the same: afab (the default) would run the forward passes of
all micro-batches before the first backward pass."""

RING_HEADS = 1
"""Key/value heads that ring attention gathers at a time; must divide those of a rank."""

_SHORT = 1024
"""Tokens for each tensor-parallel rank of a run that only creates weights."""

DATA_FOLDER = "/REPLACE/with/tokenized/data"
TOKENIZER = "REPLACE/with-your-tokenizer"
WEIGHTS = "/REPLACE/with/nanotron/checkpoint"


def build(document: PlanDocument, plan: Plan) -> Bundle:
    """Files, launch data and advice for nanotron."""
    strategy, model, job = plan.strategy, document.request.model, document.request.job
    values = {
        "title": one_line(model.name),
        "gpus": strategy.gpus,
        "run": f"plan-{document.id[:12]}",
        "real_data": strategy.cp > 1,
        "data_folder": DATA_FOLDER,
        "tokenizer": TOKENIZER,
        "vocab": model.vocab,
        "weights": WEIGHTS if job.task == "sft" and strategy.cp == 1 else "",
        "resume": WEIGHTS if strategy.cp > 1 else "",
        "architecture": architecture(model, strategy),
        "parallelism": parallelism(strategy),
        "zero_stage": strategy.zero_stage,
        "seq_len": strategy.seq_len,
        "micro_batch": strategy.micro_batch,
        "grad_accum": strategy.grad_accum,
        "global_batch": strategy.global_batch,
    }
    return Bundle(
        files={"nanotron.yaml": fill("nanotron/nanotron.yaml.j2", values)},
        launch=Launch(
            script='"${NANOTRON_PATH:?set NANOTRON_PATH to a checkout of nanotron}/run_train.py"',
            arguments='--config-file nanotron.yaml "$@"',
            variables=environment(strategy),
        ),
        topology=replica_ranks(strategy, document.request.cluster),
        files_told={"nanotron.yaml": "the whole configuration: model, parallelism, batch, optimizer, placeholders"},
        setup=setup(),
        watch=WATCH,
        out_of_memory=out_of_memory(strategy),
        notes=notes(model, job, strategy),
    )


WATCH = (
    "`time_per_iteration_ms` and `tokens_per_sec_per_gpu` that rank 0 prints, from the fifth step on, against the "
    "estimate.",
    "`Peak reserved` in the memory lines of the first steps against the estimated peak.",
    "With pipeline stages: the lines `module_name: ... | PP: ...` show which stage holds which layer, and must show "
    "the plan's split.",
)


def architecture(model: ModelSpec, strategy: Strategy) -> list[Entry]:
    """``model.model_config``: the Llama class, or Qwen2 where only that one has what the plan needs."""
    qwen2 = needs_qwen2(model, strategy.cp)
    entries: list[Entry] = [
        ("is_qwen2_config" if qwen2 else "is_llama_config", "true", "which of nanotron's models is built"),
        ("hidden_size", str(model.hidden), ""),
        ("intermediate_size", str(model.ffn), ""),
        ("num_hidden_layers", str(model.layers), ""),
        ("num_attention_heads", str(model.heads), ""),
        ("num_key_value_heads", str(model.kv_heads), ""),
        ("vocab_size", str(model.vocab), ""),
        ("max_position_embeddings", str(strategy.seq_len), ""),
        ("tie_word_embeddings", _yes(model.tied), ""),
        ("hidden_act", model.activation, ""),
        ("attention_bias", _yes(model.bias.qkv), "of query, key and value"),
        ("rope_theta", "10000.0", "PLACEHOLDER: as the model was released"),
        ("rms_norm_eps", "1.0e-05", "PLACEHOLDER: as the model was released"),
        ("bos_token_id", "1", "PLACEHOLDER"),
        ("eos_token_id", "2", "PLACEHOLDER"),
        ("pad_token_id", "null", ""),
    ]
    if qwen2:
        entries.append(("log_attn_probs", "false", "its default keeps the attention probabilities"))
    if strategy.cp > 1:
        entries += [
            ("_attn_implementation", "llama3_ring_attention", "the one that splits a sequence"),
            ("ring_attn_heads_k_stride", str(RING_HEADS), "key/value heads gathered at a time"),
        ]
    return entries


def parallelism(strategy: Strategy) -> list[Entry]:
    """``parallelism``: degrees, engine, tensor-parallel mode and recomputation."""
    if strategy.vpp > 1 or strategy.ep > 1 or strategy.pipeline_schedule not in ENGINES:
        raise InputError(
            f"nanotron has no virtual stages and no expert parallelism: vpp({strategy.vpp}), ep({strategy.ep}), "
            f"schedule({strategy.pipeline_schedule})",
            where="strategy",
            allowed="vpp = 1, ep = 1, schedule none, 1f1b or gpipe",
        )
    scatters = strategy.sequence_parallel
    return [
        ("dp", str(strategy.dp), "replicas"),
        ("pp", str(strategy.pp), "pipeline stages; layers are handed out by cost" if strategy.pp > 1 else ""),
        ("tp", str(strategy.tp), "ranks that share each matrix"),
        ("context_parallel_size", str(strategy.cp), ""),
        ("expert_parallel_size", "1", ""),
        ("pp_engine", ENGINES[strategy.pipeline_schedule], ""),
        ("tp_mode", "REDUCE_SCATTER" if scatters else "ALL_REDUCE", "REDUCE_SCATTER is sequence parallelism"),
        ("tp_linear_async_communication", _yes(scatters), "exists with REDUCE_SCATTER only"),
        ("tp_recompute_allgather", "true", ""),
        ("recompute_layer", _yes(strategy.recompute.mode == "full"), "every layer or none"),
    ]


def _yes(value: bool) -> str:
    return json.dumps(value)


def environment(strategy: Strategy) -> tuple[Variable, ...]:
    """Variables of the launch script."""
    queue = Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        "One hardware queue keeps the asynchronous collectives ahead of the matrix multiplications that hide them; "
        + (
            "the tensor-parallel layers refuse to be built without it."
            if strategy.tp > 1
            else "nanotron's own launchers set it for every plan, and the measured runs had it."
        ),
    )
    return (queue, EXPANDABLE_SEGMENTS)


def setup() -> tuple[str, ...]:
    """What has to be there before the first run."""
    return (
        "Install nanotron from its repository (commit 2411b022 of 2026-04 was read for this file) with "
        "FlashAttention 2 on every node, and set `NANOTRON_PATH` to the checkout.",
        "Look for `PLACEHOLDER` in `nanotron.yaml`: data, tokenizer, learning rate, training steps, checkpoint folder.",
    )


def notes(model: ModelSpec, job: Job, strategy: Strategy) -> tuple[str, ...]:
    """What the configuration leaves open."""
    texts = [
        "Rotary base, norm epsilon and token ids are placeholders: take them from the released configuration of the "
        "model if its weights are loaded.",
    ]
    if strategy.cp > 1:
        texts.append(
            "nanotron cannot create weights at random under context parallelism, and its random tokens do not fit it: "
            f"start the same file once with `context_parallel_size: 1`, `dp: {strategy.dp * strategy.cp}`, "
            f"`sequence_length: {_SHORT * strategy.tp}`, `dataset: null`, `save_initial_state: true` and "
            "`resume_checkpoint_path: null`, and stop it when the checkpoint of step 0 is written (weights do not "
            "depend on the length of a sequence). Then set `resume_checkpoint_path` to `checkpoints/0` and name real "
            "data."
        )
        texts.append(
            "Each context-parallel rank holds one run of the sequence, so the last one attends to most tokens and the "
            "others wait for it."
        )
    if needs_qwen2(model, strategy.cp):
        texts.append("The Qwen2 model of nanotron is written; it has no pipeline that works.")
    if job.task == "sft" and strategy.cp == 1:
        texts.append("Weights are read from `init_method.path`, a nanotron checkpoint of the finished model.")
    return tuple(texts)


def out_of_memory(strategy: Strategy) -> tuple[str, ...]:
    """What to change first, cheapest first."""
    advice = []
    if strategy.micro_batch > 1:
        advice.append(
            f"Halve `micro_batch_size` ({strategy.micro_batch}) and double `batch_accumulation_per_replica`; the "
            "global batch stays as it is."
        )
    if strategy.zero_stage == 0 and strategy.dp > 1:
        advice.append("Set `optimizer.zero_stage: 1`: optimizer states are spread over the replicas.")
    if strategy.tp > 1 and not strategy.sequence_parallel:
        advice.append("Set `tp_mode: REDUCE_SCATTER`: norms and residuals are split over the tensor-parallel ranks.")
    if strategy.recompute.mode == "none":
        advice.append("Set `recompute_layer: true`: every layer is computed again in the backward pass.")
    if strategy.pipeline_schedule == "gpipe":
        advice.append("Set `pp_engine: 1f1b`: fewer micro-batches are held at once.")
    advice.append("Ask for a plan with more margin: `planner suggest ... --memory-margin 0.1`.")
    return tuple(advice)
