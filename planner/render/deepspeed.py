"""A plan as ``ds_config.json`` and the small Python part that DeepSpeed keeps out of its configuration.

The pipeline, Ulysses sequence parallelism and recomputation have no JSON key that acts by itself: they live in
``parallel_setup.py``, which a training script imports.
"""

from __future__ import annotations

import json
from typing import Any

from planner.backends import deepspeed as rules
from planner.cost.params import distinct_kinds, layer_params, total_params
from planner.render.bundle import Bundle
from planner.render.engine import fill
from planner.render.launch import Launch
from planner.render.text import EXPANDABLE_SEGMENTS, one_line
from planner.render.topology import Axis, Topology
from planner.specs.cluster import Cluster
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan, PlanDocument
from planner.specs.strategy import Strategy

NVME_FOLDER = "/local_nvme"
"""Placeholder for the folder on a node's own NVMe drive."""


def build(document: PlanDocument, plan: Plan) -> Bundle:
    """Files, launch data and advice for DeepSpeed."""
    request, strategy = document.request, plan.strategy
    config = ds_config(request.model, strategy)
    setup = setup_context(request.model, strategy, request.job.flash_attention)
    return Bundle(
        files={
            "ds_config.json": json.dumps(config, indent=2) + "\n",
            "parallel_setup.py": fill("deepspeed/parallel_setup.py.j2", setup),
        },
        launch=Launch(
            script='"${TRAIN_SCRIPT:?set TRAIN_SCRIPT to your training script, which imports parallel_setup.py}"',
            arguments='"$@"',
            variables=(EXPANDABLE_SEGMENTS,),
        ),
        topology=topology(strategy, request.cluster),
        files_told={
            "ds_config.json": "DeepSpeed's configuration",
            "parallel_setup.py": "what lives in code instead: import it in your training script",
        },
        setup=setup_steps(strategy),
        watch=WATCH,
        out_of_memory=out_of_memory(strategy),
        notes=notes(strategy),
    )


WATCH = (
    "The step time (`engine.tput_timer` prints samples per second every `steps_per_print` steps), from the tenth "
    "step on, against the "
    "estimate.",
    "`torch.cuda.max_memory_reserved()` against the estimated peak; the warning `pytorch allocator cache flushes` "
    "must not appear.",
    "Host memory (`free -g`) when anything is offloaded.",
    "The loss: it must fall on real data. With fp16, skipped steps (`OVERFLOW`) must stop after some tens of steps.",
)


def ds_config(model: ModelSpec, strategy: Strategy) -> dict[str, Any]:
    """DeepSpeed's configuration.

    The total batch is left out: with AutoTP alone DeepSpeed counts every rank as a replica and would refuse the true
    value.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.grad_accum,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1.5e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        **precision_sections(strategy),
        "zero_optimization": zero_section(model, strategy),
    }
    if strategy.tp > 1:
        config["tensor_parallel"] = {"autotp_size": strategy.tp}
    if strategy.pp > 1 and strategy.recompute.mode == "full":
        # Acts on PipelineModule only; Hugging Face models checkpoint by themselves.
        config["activation_checkpointing"] = {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
        }
    return config


def precision_sections(strategy: Strategy) -> dict[str, Any]:
    """Compute format, and fp32 accumulation of bf16 gradients where DeepSpeed has it (from stage 1 on)."""
    if strategy.precision == "fp16":
        return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}
    if strategy.precision == "fp32":
        return {}
    sections: dict[str, Any] = {"bf16": {"enabled": True}}
    if strategy.zero_stage >= 1:
        sections["data_types"] = {"grad_accum_dtype": "fp32"}
    return sections


def zero_section(model: ModelSpec, strategy: Strategy) -> dict[str, Any]:
    """Stage, buckets and offload; the sizes are the ones that the memory estimate counts."""
    stage = strategy.zero_stage
    section: dict[str, Any] = {"stage": stage}
    if stage == 0:
        return section
    bucket = rules.bucket_elements(model.hidden)
    section |= {
        "overlap_comm": rules.overlaps_communication(stage),
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if stage == 3:
        live = rules.live_elements(max(layer_params(model, kind).total for kind in distinct_kinds(model)))
        section |= {
            "stage3_prefetch_bucket_size": rules.prefetch_elements(model.hidden),
            "stage3_param_persistence_threshold": rules.persistence_elements(model.hidden),
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        if strategy.secondary_shard_degree:
            section["zero_hpz_partition_size"] = strategy.secondary_shard_degree
    return section | offload_sections(model, strategy)


def offload_sections(model: ModelSpec, strategy: Strategy) -> dict[str, Any]:
    """Where optimizer states and parameters go when they leave the GPU."""
    offload = strategy.offload
    sections: dict[str, Any] = {}
    if offload.device != "none":
        target: dict[str, Any] = {"device": offload.device, "pin_memory": True}
        if offload.device == "nvme":
            target["nvme_path"] = NVME_FOLDER
        if strategy.zero_stage == 3:
            if offload.optimizer < 1:
                target["ratio"] = offload.optimizer
            sections["sub_group_size"] = rules.sub_group_elements(total_params(model) / strategy.shard_degree)
        sections["offload_optimizer"] = target
    if offload.parameters != "none":
        parameters: dict[str, Any] = {"device": offload.parameters, "pin_memory": True}
        if offload.parameters == "nvme":
            # Each buffer must hold the largest single weight, which is the embedding table.
            parameters |= {"nvme_path": NVME_FOLDER, "buffer_size": max(100_000_000, model.vocab * model.hidden)}
        sections["offload_param"] = parameters
    return sections


def topology(strategy: Strategy, cluster: Cluster) -> Topology:
    """DeepSpeed's rank order: tensor or sequence ranks are neighbours, then data, then pipeline stages."""
    return Topology(
        (
            Axis("tp", strategy.tp, "one layer's matrices"),
            Axis("sp", strategy.cp, "one sequence (Ulysses)"),
            Axis(
                "dp",
                strategy.dp,
                "gradients" if strategy.zero_stage == 0 else "gradients and sharded states",
                over="sp",
            ),
            Axis("pp", strategy.pp, "the model's stages"),
        ),
        cluster.local_gpus,
    )


def setup_context(model: ModelSpec, strategy: Strategy, flash_attention: bool) -> dict[str, Any]:
    """What ``parallel_setup.py`` holds: only the helpers that this plan needs."""
    pipeline, ulysses, tensor = strategy.pp > 1, strategy.cp > 1, strategy.tp > 1
    leaf = model.moe is not None and strategy.zero_stage == 3
    constants = [
        ("RECOMPUTE", f'"{strategy.recompute.mode}"', "none or full"),
        ("SEQ_LEN", str(strategy.seq_len), "tokens of a sequence, whole and without padding"),
    ]
    if pipeline:
        constants += [("PIPELINE_STAGES", str(strategy.pp), ""), ("DATA_PARALLEL", str(strategy.dp), "")]
    if tensor:
        constants.append(("TENSOR_RANKS", str(strategy.tp), "also autotp_size in ds_config.json"))
    if ulysses:
        constants += [
            ("SEQUENCE_RANKS", str(strategy.cp), "ranks that share one sequence"),
            ("MICRO_BATCH", str(strategy.micro_batch), "also train_micro_batch_size_per_gpu in ds_config.json"),
            (
                "ATTENTION",
                '"flash_attention_2"' if flash_attention else '"sdpa"',
                "Hugging Face attention implementation",
            ),
        ]
    return {
        "title": one_line(model.name),
        "gpus": strategy.gpus,
        "usage": _usage(pipeline=pipeline, ulysses=ulysses, leaf=leaf),
        "constants": constants,
        "pipeline": pipeline,
        "ulysses": ulysses,
        "tensor": tensor,
        "leaf": leaf,
    }


def _usage(*, pipeline: bool, ulysses: bool, leaf: bool) -> list[str]:
    """The calls of a training script, in order, for the docstring of ``parallel_setup.py``."""
    if pipeline:
        return [
            "deepspeed.init_distributed()",
            "model = pipeline(layers, loss_function, DecoderLayer)    # LayerSpec of every module, embedding to head",
            "engine = initialize(model)",
            "loss = engine.train_batch(iterator)                      # all micro-batches of a step",
        ]
    lines = ["deepspeed.init_distributed()"]
    if ulysses:
        lines.append("mpu = register_ulysses(name_or_path)    # before the model is loaded")
    lines.append("model = AutoModelForCausalLM.from_pretrained(name_or_path)")
    if leaf:
        lines.append("mark_experts(model, SparseMoeBlock)    # the class of the expert layer in your model")
    lines.append(f"engine = initialize(model{', mpu' if ulysses else ''})")
    if ulysses:
        lines.append("loader = split_batches(loader, engine.device)")
    return [
        *lines,
        "for batch in loader:",
        "    loss = engine(**batch).loss; engine.backward(loss); engine.step()",
    ]


def setup_steps(strategy: Strategy) -> tuple[str, ...]:
    """What has to be there before the first run."""
    steps = [
        "Install DeepSpeed 0.17 to 0.19 with PyTorch on every node"
        + (
            ", and its CPU Adam: `ds_report` must show `cpu_adam` as compatible."
            if strategy.offload.device != "none"
            else "."
        ),
        "Import `parallel_setup.py` in your training script (its docstring shows the calls, in order) and set "
        "`TRAIN_SCRIPT` to that "
        "script.",
        "Choose learning rate and weight decay in `ds_config.json`; the values there are placeholders. Leave "
        "`train_batch_size` out: "
        "DeepSpeed derives it.",
    ]
    if strategy.zero_stage == 3:
        steps.append(
            "Keep a reference to `transformers.integrations.HfDeepSpeedConfig(config())` while the model is "
            "loaded, so that it is "
            "sharded at once instead of being whole on every GPU."
        )
    if "nvme" in (strategy.offload.device, strategy.offload.parameters):
        steps.append(f"Replace `{NVME_FOLDER}` in `ds_config.json` by a folder on each node's own NVMe drive.")
    return tuple(steps)


def notes(strategy: Strategy) -> tuple[str, ...]:
    """What DeepSpeed reports differently, or leaves to the training script."""
    texts = []
    if strategy.tp > 1:
        texts.append(
            f"With AutoTP DeepSpeed prints a train_batch_size {strategy.tp} times too large: it counts every rank "
            "as a replica. "
            f"{strategy.global_batch} distinct sequences go into a step if the ranks of one replica read the same "
            "samples, "
            "which `data_rank` helps with."
        )
    if strategy.cp > 1:
        texts.append(
            "The loss of a Ulysses rank covers its part of the sequence: average it over the sequence ranks, "
            "weighted by their "
            "valid tokens, before logging and backward."
        )
    if strategy.pp > 1:
        texts.append("Tied embeddings need `TiedLayerSpec` in the layer list.")
    return tuple(texts)


def out_of_memory(strategy: Strategy) -> tuple[str, ...]:
    """What to change first, cheapest first."""
    advice = []
    if strategy.micro_batch > 1:
        advice.append(
            f"Halve `train_micro_batch_size_per_gpu` ({strategy.micro_batch}) and double `gradient_accumulation_steps`."
        )
    if strategy.recompute.mode == "none":
        advice.append('Set `RECOMPUTE = "full"` in `parallel_setup.py` (about a third more compute).')
    if strategy.zero_stage == 3:
        advice.append(
            "Halve `stage3_max_live_parameters`, `stage3_max_reuse_distance` and `stage3_prefetch_bucket_size`."
        )
    if strategy.zero_stage >= 1:
        advice.append("Halve `reduce_bucket_size` and `allgather_bucket_size`.")
    if strategy.pp == 1 and strategy.zero_stage < 3 and strategy.tp == 1:
        advice.append(f"Raise `stage` from {strategy.zero_stage} to {strategy.zero_stage + 1}.")
    if strategy.pp == 1 and strategy.zero_stage >= 1 and strategy.offload.device == "none":
        advice.append(
            'Offload the optimizer: `"offload_optimizer": {"device": "cpu", "pin_memory": true}` (slow steps).'
        )
    advice.append("Ask for a plan with more margin: `planner suggest ... --memory-margin 0.1`.")
    return tuple(advice)
