"""A plan as the files of Hugging Face accelerate and the Trainer: accelerate_config.yaml, training_arguments.json and
plan_setup.py.

DeepSpeed plans add ds_config.json.  Only keys that accelerate 1.15 reads are written: it ignores unknown nested keys
without a word.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from planner.render import deepspeed
from planner.render.bundle import Bundle
from planner.render.engine import fill
from planner.render.fsdp import flat_mesh
from planner.render.launch import Launch
from planner.render.text import EXPANDABLE_SEGMENTS, one_line
from planner.render.topology import Axis, Topology
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan, PlanDocument
from planner.specs.strategy import Strategy
from planner.units import counted

CONFIG, ARGUMENTS, SETUP, DEEPSPEED = (
    "accelerate_config.yaml",
    "training_arguments.json",
    "plan_setup.py",
    "ds_config.json",
)

MIXED_PRECISION = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp32": "no"}
"""The job's number format in accelerate's words (accelerate/utils/dataclasses.py, PrecisionType)."""

WATCH = (
    "The line `Total train batch size (w. parallel, distributed & accumulation)` that the Trainer prints first: it "
    "must be the plan's global batch.",
    "The step time (progress bar), from the tenth step on, against the estimate.",
    "`torch.cuda.max_memory_reserved()` against the estimated peak, and `num_alloc_retries` of "
    "`torch.cuda.memory_stats()`, which must stay 0.",
    "The loss: it must fall on real data.",
)

MARGIN = "Ask for a plan with more margin: `planner suggest ... --memory-margin 0.1`."


def build_fsdp(document: PlanDocument, plan: Plan) -> Bundle:
    """Files, launch data and advice for FSDP2 through accelerate."""
    request, strategy = document.request, plan.strategy
    config = machine_section(request.cluster) | fsdp_sections(strategy)
    return Bundle(
        files=_files(document, strategy, config, fsdp_arguments(strategy)),
        launch=_launch(),
        topology=fsdp_topology(strategy, request.cluster),
        files_told=_TOLD,
        setup=(
            "Install accelerate 1.15 and transformers 5.23 with PyTorch on every node"
            + (", and torchao for fp8." if strategy.precision == "fp8" else "."),
            *_SETUP,
        ),
        watch=WATCH,
        out_of_memory=fsdp_out_of_memory(strategy),
        notes=_batch_note(strategy) + fsdp_notes(strategy),
    )


def build_deepspeed(document: PlanDocument, plan: Plan) -> Bundle:
    """Files, launch data and advice for DeepSpeed through accelerate."""
    request, strategy = document.request, plan.strategy
    config = machine_section(request.cluster) | deepspeed_sections(request.model, strategy, request.job)
    ds_config = deepspeed.ds_config(request.model, strategy)
    files = _files(document, strategy, config, deepspeed_arguments(strategy, ds_config))
    return Bundle(
        files=files | {DEEPSPEED: json.dumps(ds_config, indent=2) + "\n"},
        launch=_launch(leaf_modules=_leaf_modules(request.model, strategy)),
        topology=deepspeed.topology(strategy, request.cluster),
        files_told={**_TOLD, DEEPSPEED: "DeepSpeed's configuration; accelerate_config.yaml names it"},
        setup=deepspeed_setup(request.model, strategy),
        watch=(*WATCH, "Host memory (`free -g`) when anything is offloaded."),
        out_of_memory=deepspeed_out_of_memory(strategy),
        notes=_batch_note(strategy) + deepspeed_notes(strategy, request.cluster),
    )


_TOLD = {
    CONFIG: "accelerate's configuration: processes, sharding, precision",
    ARGUMENTS: "the Trainer's arguments: batch, precision, recomputation, optimizer",
    SETUP: "what no file holds (sequence length, attention): import it in your training script",
}

_SETUP = (
    f"Import `{SETUP}` in your training script (its docstring shows the calls) and set `TRAIN_SCRIPT` to that script; "
    "with TRL pass `max_length=SEQ_LEN` and `packing=True` to its own arguments.",
    f"Learning rate, weight decay and output folder in `{ARGUMENTS}` are placeholders.",
)


def _files(
    document: PlanDocument, strategy: Strategy, config: dict[str, Any], arguments: dict[str, Any]
) -> dict[str, str]:
    """The three files that both kinds have."""
    model = document.request.model
    title = one_line(model.name)
    return {
        CONFIG: f"# {title} on {counted(strategy.gpus, 'GPU')}.\n" + yaml.safe_dump(config, sort_keys=False),
        ARGUMENTS: json.dumps(arguments, indent=2) + "\n",
        SETUP: fill(
            "accelerate/plan_setup.py.j2",
            {"title": title, "gpus": strategy.gpus, "constants": constants(model, strategy, document.request.job)},
        ),
    }


def _launch(*, leaf_modules: bool = False) -> Launch:
    """accelerate's own launcher, which can be told the expert block that ZeRO-3 gathers as one."""
    script = f'"${{TRAIN_SCRIPT:?set TRAIN_SCRIPT to your training script, which imports {SETUP}}}"'
    prepare = (
        "MOE_OPTIONS=()",
        'if [[ -n "${MOE_LAYER_CLASS:-}" ]]; then',
        '  MOE_OPTIONS=(--deepspeed_moe_layer_cls_names "$MOE_LAYER_CLASS")',
        "fi",
    )
    return Launch(
        script='"${MOE_OPTIONS[@]}" \\\n  ' + script if leaf_modules else script,
        arguments='"$@"',
        variables=(EXPANDABLE_SEGMENTS,),
        prepare=prepare if leaf_modules else (),
        template="launch/accelerate.sh.j2",
        told="accelerate launch",
    )


def constants(model: ModelSpec, strategy: Strategy, job: Job) -> list[tuple[str, str, str]]:
    """(name, value as Python source, remark) of ``plan_setup.py``."""
    return [
        ("SEQ_LEN", str(strategy.seq_len), "tokens of one packed sequence"),
        ("ATTENTION", f'"{attention(model, job)}"', "Hugging Face attention implementation"),
        ("WEIGHTS", '"float32"' if strategy.precision == "fp32" else '"auto"', "number format the weights load in"),
    ]


def attention(model: ModelSpec, job: Job) -> str:
    """Context parallelism of FSDP2 exists for sdpa only (transformers/trainer.py, _prepare_context_parallel_inputs),
    which models with attention sinks refuse (transformers/models/gpt_oss: _supports_sdpa)."""
    if not job.flash_attention:
        return "eager"
    return "flex_attention" if model.sinks else "sdpa"


def machine_section(cluster: Cluster) -> dict[str, Any]:
    """Processes and nodes; address, port and node number come from the launch script.

    So does the kind of rendezvous: accelerate reads neither rdzv_backend nor same_network from the file, because
    their command-line defaults are never unset (accelerate/commands/launch.py, _validate_launch_command).
    """
    return {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": cluster.nodes,
        # Of all nodes together.
        "num_processes": cluster.gpus,
        "main_training_function": "main",
        "use_cpu": False,
        "debug": False,
    }


def fsdp_sections(strategy: Strategy) -> dict[str, Any]:
    """FSDP2 and, where there are replicas or context ranks, the mesh."""
    replicate, shard = flat_mesh(strategy)
    sections: dict[str, Any] = {
        "distributed_type": "FSDP",
        "mixed_precision": MIXED_PRECISION[strategy.precision],
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": strategy.zero_stage == 3,
            # The classes of blocks are those that the model itself names (_no_split_modules).
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": strategy.recompute.mode == "full",
            "fsdp_offload_params": strategy.offload.device == "cpu",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            # Only rank 0 reads the weights; accelerate refuses it together with torchao's fp8.
            "fsdp_cpu_ram_efficient_loading": strategy.precision != "fp8",
        },
    }
    if strategy.precision == "fp8":
        # The estimate gathers weights in 16 bits.
        sections["fp8_config"] = {"fp8_backend": "AO", "fp8_enable_fsdp_float8_all_gather": False}
    if replicate > 1 or strategy.cp > 1:
        sections["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": replicate,
            "parallelism_config_dp_shard_size": shard,
            "parallelism_config_tp_size": 1,
            "parallelism_config_cp_size": strategy.cp,
        }
    if strategy.cp > 1:
        # Keys and values go round a ring, as the estimate has it; the default gathers all of them.
        sections["parallelism_config"]["parallelism_config_cp_comm_strategy"] = "alltoall"
    return sections


def deepspeed_sections(model: ModelSpec, strategy: Strategy, job: Job) -> dict[str, Any]:
    """The DeepSpeed file and, for Ulysses, the sequence ranks.

    mixed_precision is left out: accelerate refuses it beside a DeepSpeed file (DeepSpeedPlugin,
    _deepspeed_config_checks).
    """
    sections: dict[str, Any] = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": DEEPSPEED,
            # torchrun on every node, as launch.sh starts it; the default is pdsh with a hostfile.
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": strategy.zero_stage == 3,
        },
    }
    if strategy.cp > 1:
        replicated = strategy.zero_stage == 0
        sections["parallelism_config"] = {
            # accelerate checks no product here, but multiplies these two into DeepSpeed's train_batch_size.
            "parallelism_config_dp_replicate_size": strategy.dp if replicated else 1,
            "parallelism_config_dp_shard_size": 1 if replicated else strategy.dp,
            "parallelism_config_sp_size": strategy.cp,
            "parallelism_config_sp_backend": "deepspeed",
            "parallelism_config_sp_seq_length": strategy.seq_len,
            "parallelism_config_sp_seq_length_is_variable": False,
            "parallelism_config_sp_attn_implementation": attention(model, job),
        }
    return sections


def _common_arguments(strategy: Strategy) -> dict[str, Any]:
    """Batch, precision and placeholders of the optimizer."""
    return {
        "output_dir": "output",
        "per_device_train_batch_size": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.grad_accum,
        # Both false leaves the choice to accelerate_config.yaml; fp8 and fp32 need that.
        "bf16": strategy.precision == "bf16",
        "fp16": strategy.precision == "fp16",
        "max_steps": 1000,
        "learning_rate": 1.5e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "dataloader_drop_last": True,
    }


def fsdp_arguments(strategy: Strategy) -> dict[str, Any]:
    """The Trainer's arguments under FSDP2, whose own settings stay in accelerate's file.

    Recomputation too: the Trainer refuses gradient_checkpointing beside fsdp_activation_checkpointing.
    """
    return {
        **_common_arguments(strategy),
        "optim": "adamw_torch_fused",
        # Otherwise gradients of all micro-batches but the last stay whole on every GPU (Accelerator.no_sync).
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    }


def deepspeed_arguments(strategy: Strategy, ds_config: dict[str, Any]) -> dict[str, Any]:
    """The Trainer's arguments under DeepSpeed; the Trainer refuses values that differ from DeepSpeed's file."""
    adam = ds_config["optimizer"]["params"]
    arguments = {
        **_common_arguments(strategy),
        "learning_rate": adam["lr"],
        "adam_beta1": adam["betas"][0],
        "adam_beta2": adam["betas"][1],
        "adam_epsilon": adam["eps"],
        "weight_decay": adam["weight_decay"],
        "max_grad_norm": ds_config["gradient_clipping"],
        # Named here too: the Trainer counts tensor-parallel ranks from this argument alone.
        "deepspeed": DEEPSPEED,
    }
    if strategy.recompute.mode == "full":
        # transformers 5.23 calls it activation_checkpointing too; this name is known to older releases as well.
        arguments["gradient_checkpointing"] = True
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    return arguments


def fsdp_topology(strategy: Strategy, cluster: Cluster) -> Topology:
    """The mesh of ParallelismConfig._get_mesh: context ranks next to each other, then shards, then replicas."""
    replicate, shard = flat_mesh(strategy)
    return Topology(
        (
            Axis("cp", strategy.cp, "one sequence"),
            Axis("dp_shard", shard, "weights, gradients and optimizer states", over="cp"),
            Axis("dp_replicate", replicate, "gradients, summed over the copies"),
        ),
        cluster.local_gpus,
    )


def _batch_note(strategy: Strategy) -> tuple[str, ...]:
    """How the Trainer counts a step (transformers/trainer.py, get_total_train_batch_size)."""
    sharing = strategy.tp * strategy.cp
    ranks = (
        f"{strategy.gpus} processes / {sharing} that share a sequence"
        if sharing > 1
        else f"{strategy.dp} process{'es' if strategy.dp > 1 else ''}"
    )
    return (
        f"Batch of a step: per_device_train_batch_size({strategy.micro_batch}) * gradient_accumulation_steps"
        f"({strategy.grad_accum}) * {ranks} = {strategy.global_batch} sequences.",
    )


def fsdp_notes(strategy: Strategy) -> tuple[str, ...]:
    """What FSDP2 through accelerate does without being told, or leaves open."""
    texts = []
    if strategy.precision in ("bf16", "fp16", "fp8"):
        texts.append("accelerate keeps trainable weights in fp32 and reduces gradients in 16 bits.")
    if strategy.grad_accum > 1:
        texts.append(
            "`sync_each_batch` keeps gradients sharded between micro-batches. Without it each GPU holds 2 bytes for "
            "every parameter of the model, and reduces once a step."
        )
    if strategy.cp > 1:
        texts.append("Context parallelism allows no padding and only the causal attention mask: pack the samples.")
    return tuple(texts)


def fsdp_out_of_memory(strategy: Strategy) -> tuple[str, ...]:
    """What to change first, cheapest first."""
    advice = []
    if strategy.micro_batch > 1:
        advice.append(_halve_batch(strategy))
    if strategy.recompute.mode == "none":
        advice.append(f"Set `fsdp_activation_checkpointing: true` in `{CONFIG}` (about a third more compute).")
    if strategy.zero_stage < 3:
        advice.append(f"Set `fsdp_reshard_after_forward: true` in `{CONFIG}`: one more all-gather a layer.")
    if flat_mesh(strategy)[0] > 1:
        advice.append("Shard over more ranks: raise `..._dp_shard_size` and lower `..._dp_replicate_size`.")
    if strategy.offload.device == "none":
        advice.append(f"Set `fsdp_offload_params: true` in `{CONFIG}` (slow: the optimizer runs on the host).")
    return (*advice, MARGIN)


def _halve_batch(strategy: Strategy) -> str:
    return (
        f"Halve `per_device_train_batch_size` ({strategy.micro_batch}) and double `gradient_accumulation_steps` in "
        f"`{ARGUMENTS}`; the global batch stays as it is."
    )


def _leaf_modules(model: ModelSpec, strategy: Strategy) -> bool:
    return model.moe is not None and strategy.zero_stage == 3


def deepspeed_setup(model: ModelSpec, strategy: Strategy) -> tuple[str, ...]:
    """What has to be there before the first run."""
    offloaded = strategy.offload.device != "none"
    steps = [
        "Install accelerate 1.15, transformers 5.23 and DeepSpeed 0.19 with PyTorch on every node"
        + (", and its CPU Adam: `ds_report` must show `cpu_adam` as compatible." if offloaded else "."),
        *_SETUP,
        f"Change optimizer values in `{ARGUMENTS}` and `{DEEPSPEED}` together: the Trainer stops where they differ.",
    ]
    if _leaf_modules(model, strategy):
        steps.append(
            "If the experts are modules of their own, set `MOE_LAYER_CLASS` to the class of the whole expert block "
            "(for example `MixtralSparseMoeBlock`), so that ZeRO-3 gathers it as one: single experts would hang."
        )
    if "nvme" in (strategy.offload.device, strategy.offload.parameters):
        steps.append(f"Replace `{deepspeed.NVME_FOLDER}` in `{DEEPSPEED}` by a folder on each node's own NVMe drive.")
    return tuple(steps)


def deepspeed_notes(strategy: Strategy, cluster: Cluster) -> tuple[str, ...]:
    """What DeepSpeed through accelerate does without being told, or leaves open."""
    texts = []
    if strategy.tp > 1:
        texts.append("DeepSpeed's own log counts tensor-parallel ranks as replicas; the Trainer's figure is right.")
    if cluster.accelerator.vendor.lower() == "amd" and strategy.precision == "bf16":
        texts.append(
            "On AMD GPUs accelerate reduces bf16 gradients in fp32 (`communication_data_type`), which the estimate "
            "does not count."
        )
    return tuple(texts)


def deepspeed_out_of_memory(strategy: Strategy) -> tuple[str, ...]:
    """What to change first, cheapest first; sizes in DeepSpeed's file as for DeepSpeed itself."""
    advice = []
    if strategy.micro_batch > 1:
        advice.append(_halve_batch(strategy) + f" `{DEEPSPEED}` must say the same.")
    if strategy.recompute.mode == "none":
        advice.append(f"Set `gradient_checkpointing` in `{ARGUMENTS}` to true (about a third more compute).")
    own = deepspeed.out_of_memory(strategy.model_copy(update={"micro_batch": 1}))
    return (*advice, *(text for text in own if "RECOMPUTE" not in text))
