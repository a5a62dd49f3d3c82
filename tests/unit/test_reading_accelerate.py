"""accelerate's file and the Trainer's arguments read back: rendered ones exactly, written ones with what is wrong."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import pytest
import yaml

from planner.errors import InputError
from planner.reading import READERS, Configuration, read_configuration
from planner.reading.huggingface import keys
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Offload, Recompute
from tests.random_plans import configuration_files, corner_plans, random_plans

KINDS = ("accelerate-fsdp", "accelerate-deepspeed")
ARGUMENTS: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True}
MACHINES: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "num_machines": 2, "num_processes": 16}
FSDP2 = MACHINES | {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}


def read(
    config: dict[str, Any] | str | None = None, arguments: dict[str, Any] | None = None, **files: Any
) -> Configuration:
    """The configuration that these files hold; keyword arguments are further JSON files."""
    texts = {f"{name}.json": json.dumps(value) for name, value in files.items()}
    if config is not None:
        texts["config.yaml"] = config if isinstance(config, str) else yaml.safe_dump(config)
    if arguments is not None:
        texts["arguments.json"] = json.dumps(arguments)
    return read_configuration(texts)


def ids(configuration: Configuration) -> list[str]:
    return [finding.id for finding in configuration.findings]


def with_fsdp(**fsdp: Any) -> dict[str, Any]:
    return FSDP2 | {"fsdp_config": {**FSDP2["fsdp_config"], **fsdp}}


# --- Round trip


def check_round_trip(plan: PlanDocument) -> None:
    """Every field that the files express is the plan's; nothing is complained of."""
    files = configuration_files(plan)
    found, s, request = read_configuration(files), plan.best.strategy, plan.request
    assert found.backend == plan.best.backend
    # Sizes of buckets and windows follow the model's width, which no file states.
    assert (found.findings, [text for text in found.unread if not text.startswith("zero_optimization.")]) == ((), [])
    stated = {name: value for name, value in vars(found.strategy).items() if value is not None}
    assert stated == {name: getattr(s, name) for name in stated}
    # One stage holds all layers; without hpZ there is no second copy.
    assert set(vars(found.strategy)) - set(stated) <= {"layers_per_stage", "secondary_shard_degree"}
    assert found.strategy.secondary_shard_degree == s.secondary_shard_degree
    told = (found.gpus, found.gpus_per_node, found.seq_len, found.global_batch, found.precision)
    assert told == (s.gpus, request.cluster.local_gpus, s.seq_len, s.global_batch, s.precision)
    assert found.flash_attention is request.job.flash_attention


@pytest.mark.parametrize("kind", KINDS)
def test_rendered_plans_come_back(kind: str) -> None:
    """A hundred random plans and every tenth corner."""
    for plan in (*random_plans(kind, 100, seed=7), *list(corner_plans(kind))[::10]):
        check_round_trip(plan)


# --- FSDP


def test_all_processes_shard_without_a_mesh() -> None:
    """num_processes is the total; the batch follows from the Trainer's arguments."""
    found = read(FSDP2, ARGUMENTS | {"gradient_accumulation_steps": 1})
    assert (found.backend, found.gpus, found.gpus_per_node, found.global_batch) == ("accelerate-fsdp", 16, 8, 32)
    s = found.strategy
    assert (s.dp, s.shard_degree, s.zero_stage, s.micro_batch, s.grad_accum) == (16, 16, 3, 2, 1)
    assert (s.recompute, s.offload) == (Recompute(), Offload())
    assert found.findings == ()


@pytest.mark.parametrize(
    ("strategy", "stage", "shard"),
    [
        ("FULL_SHARD", 3, 16),
        ("SHARD_GRAD_OP", 2, 16),
        ("NO_SHARD", 0, 1),
        ("HYBRID_SHARD", 3, 8),
        ("HYBRID_SHARD_ZERO2", 2, 8),
        (1, 3, 16),
        ("2", 2, 16),
        (4, 3, 8),
    ],
)
def test_version_1_spells_sharding_by_name_or_number(strategy: str | int, stage: int, shard: int) -> None:
    """Hybrid strategies shard inside a node."""
    found = read(with_fsdp(fsdp_version=1, fsdp_sharding_strategy=strategy))
    assert (found.strategy.zero_stage, found.strategy.shard_degree) == (stage, shard)
    assert found.format == "accelerate FSDP version 1"


def test_version_1_is_the_default_of_the_file_and_2_of_the_trainer() -> None:
    """The launcher's default is 1, TrainingArguments' is 2."""
    config = dict(FSDP2, fsdp_config={"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"})
    assert read(config).format == "accelerate FSDP version 1"
    assert read(None, ARGUMENTS | {"fsdp": True}).strategy.zero_stage == 3


@pytest.mark.parametrize(("word", "stage"), [("false", 2), ("no", 2), ("True", 3), (False, 2), ("1", 3)])
def test_booleans_come_as_words(word: str | bool, stage: int) -> None:
    """Whatever accelerate takes for a boolean is one."""
    found = read(with_fsdp(fsdp_reshard_after_forward=word, fsdp_offload_params="yes"))
    assert found.strategy.zero_stage == stage
    assert found.strategy.offload == Offload(optimizer=1, device="cpu", parameters="cpu")


def test_prefix_may_be_missing_in_fsdp_config() -> None:
    """The launcher puts it before."""
    config = dict(
        FSDP2, fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": False}
    )
    found = read(config)
    assert (found.strategy.zero_stage, found.findings) == (2, ())


@pytest.mark.parametrize(
    ("change", "finding", "severity"),
    [
        ({"fsdp_reshard_after": True}, "ignored-key", "warning"),
        ({"fsdp_reshard_after_forward": "FULL_SHARD"}, "fsdp-version-spelling", "error"),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, "fsdp-version-key", "warning"),
        ({"fsdp_version": 1, "fsdp_reshard_after_forward": True}, "fsdp-version-key", "warning"),
        ({"fsdp_version": 1, "fsdp_sharding_strategy": "ZERO3"}, "fsdp-strategy", "error"),
        ({"fsdp_version": 3}, "fsdp-version", "error"),
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, "fsdp-no-wrap", "warning"),
        ({"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_activation_checkpointing": True}, "fsdp-no-wrap", "error"),
        ({"fsdp_offload_params": "maybe"}, "wrong-type", "error"),
        ({"fsdp_version": [2]}, "wrong-type", "error"),
    ],
)
def test_fsdp_findings(change: dict[str, Any], finding: str, severity: str) -> None:
    """Each is named with its line in the file."""
    found = read(with_fsdp(**change))
    told = next(one for one in found.findings if one.id == finding)
    assert told.severity == severity
    key = next(reversed(change))
    assert told.where.startswith("config.yaml:")
    assert any(name in told.where for name in change), (told.where, key)


def test_misspelt_nested_key_names_the_right_one() -> None:
    """fsdp_reshard_after is dropped without a word by accelerate."""
    (told,) = read(with_fsdp(fsdp_reshard_after=True)).findings
    assert told.hint == "did you mean fsdp_reshard_after_forward?"


def test_recomputation_set_twice() -> None:
    """FSDP's and the Trainer's exclude each other, under both names of the argument."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        found = read(with_fsdp(fsdp_activation_checkpointing=True), ARGUMENTS | {name: True})
        assert "recompute-twice" in ids(found)
    alone = read(FSDP2, ARGUMENTS | {"activation_checkpointing": True, "gradient_checkpointing": False})
    assert alone.strategy.recompute == Recompute(mode="full")


def test_accumulation_without_sync_keeps_whole_gradients() -> None:
    """Silently expensive: the hint is the setting that our files write."""
    found = read(FSDP2, ARGUMENTS)
    told = next(one for one in found.findings if one.id == "unsharded-gradients")
    kept = json.loads("{" + told.hint + "}")
    assert read(FSDP2, ARGUMENTS | kept).findings == ()


def test_launcher_word_and_arguments_disagree() -> None:
    """The Trainer's format wins; without one the launcher's counts."""
    found = read(FSDP2, ARGUMENTS | {"bf16": False, "fp16": True, "gradient_accumulation_steps": 1})
    assert (found.precision, ids(found)) == ("fp16", ["precision-mismatch"])
    assert read(FSDP2, {**ARGUMENTS, "bf16": False}).precision == "bf16"
    assert read(FSDP2 | {"mixed_precision": "no"}, ARGUMENTS).precision == "bf16"
    assert read("distributed_type: NO\nmixed_precision: no\n").precision == "fp32"


@pytest.mark.parametrize(
    ("mesh", "found"), [((2, 2, 1, 4), (4, 8, 4)), ((1, 1, 1, 16), (1, 16, 16)), ((1, 4, 4, 1), (4, 4, 1))]
)
def test_mesh(mesh: tuple[int, int, int, int], found: tuple[int, int, int]) -> None:
    """dp_replicate * dp_shard replicas; shard groups span the context ranks."""
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
    sizes = {f"parallelism_config_{name}": size for name, size in zip(names, mesh, strict=True)}
    s = read(FSDP2 | {"parallelism_config": sizes}).strategy
    assert (s.dp, s.shard_degree, s.cp, s.tp) == (*found, mesh[2])


# --- DeepSpeed


def deepspeed(**keys_: Any) -> dict[str, Any]:
    return MACHINES | {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_multinode_launcher": "standard", **keys_},
    }


def test_inline_deepspeed() -> None:
    """Stage 2 is accelerate's default; the rest comes from the Trainer's arguments."""
    found = read(deepspeed() | {"mixed_precision": "bf16"}, ARGUMENTS)
    s = found.strategy
    assert (found.backend, found.precision, s.zero_stage, s.dp, s.shard_degree) == (
        "accelerate-deepspeed",
        "bf16",
        2,
        16,
        16,
    )
    assert (s.micro_batch, s.grad_accum, found.global_batch) == (2, 4, 128)
    moved = read(deepspeed(zero_stage=3, offload_optimizer_device="cpu", offload_param_device="cpu"), ARGUMENTS)
    assert moved.strategy.offload == Offload(optimizer=1, device="cpu", parameters="cpu")


def test_inline_nvme_path_never_arrives() -> None:
    """The launcher exports devices but no paths."""
    assert "nvme-path" in ids(read(deepspeed(zero_stage=3, offload_optimizer_device="nvme")))


AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
}


@pytest.mark.parametrize("where", ["file", "arguments", "inline", "plain"])
def test_auto_follows_the_arguments(where: str) -> None:
    """The DeepSpeed file may be named by either file or stand in the arguments."""
    if where == "file":
        found = read(deepspeed(deepspeed_config_file="configs/ds.json"), ARGUMENTS, ds=AUTO)
    elif where == "arguments":
        found = read(deepspeed(), ARGUMENTS | {"deepspeed": "./ds.json"}, ds=AUTO)
    elif where == "inline":
        found = read(deepspeed(), ARGUMENTS | {"deepspeed": AUTO})
    else:
        found = read(None, ARGUMENTS | {"deepspeed": AUTO})
    s = found.strategy
    assert found.backend == "accelerate-deepspeed"
    assert (found.precision, s.zero_stage, s.micro_batch, s.grad_accum) == ("bf16", 3, 2, 4)
    assert s.offload == Offload(optimizer=1, device="cpu")
    assert (s.dp, found.global_batch) == ((None, None) if where == "plain" else (16, 128))


def test_auto_without_arguments_is_unread() -> None:
    """Nobody says what it stands for."""
    found = read(deepspeed(deepspeed_config_file="ds.json"), None, ds=AUTO)
    assert found.strategy.micro_batch is None
    assert any("auto" in text or "micro" in text for text in (*found.unread, *(one.message for one in found.findings)))


def test_missing_deepspeed_file_is_asked_for() -> None:
    """The file decides memory."""
    found = read(deepspeed(deepspeed_config_file="ds.json"), ARGUMENTS)
    assert "deepspeed-file-missing" in ids(found)
    assert found.strategy.zero_stage is None
    assert read(None, ARGUMENTS | {"deepspeed": "ds.json"}).unread


def test_pdsh_is_the_default_of_several_machines() -> None:
    """launch.sh on every machine needs the standard launcher."""
    config = MACHINES | {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}
    assert "deepspeed-launcher" in ids(read(config))
    assert "deepspeed-launcher" not in ids(read(config | {"num_machines": 1}))


# --- The other types


def test_replicas_and_single_process() -> None:
    """DistributedDataParallel shards nothing; NO is one process."""
    found = read(MACHINES | {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}, ARGUMENTS)
    assert (found.backend, found.strategy.zero_stage, found.strategy.dp) == ("fsdp", 0, 16)
    assert found.global_batch == 128
    assert read({"distributed_type": "NO"}).gpus == 1


def test_megatron_defaults_of_the_plugin() -> None:
    """Context parallelism of 2 and full recomputation, unless the file says otherwise."""
    config = MACHINES | {
        "distributed_type": "MEGATRON_LM",
        "megatron_lm_config": {
            "megatron_lm_tp_degree": 2,
            "megatron_lm_pp_degree": 2,
            "megatron_lm_num_micro_batches": 8,
            "megatron_lm_sequence_parallelism": "true",
            "megatron_lm_use_distributed_optimizer": True,
        },
    }
    found = read(config, ARGUMENTS)
    s = found.strategy
    assert (found.backend, s.tp, s.pp, s.cp, s.dp, s.zero_stage, s.shard_degree) == ("megatron", 2, 2, 2, 2, 1, 4)
    assert (s.grad_accum, s.sequence_parallel, s.recompute) == (8, True, Recompute(mode="full"))
    assert {"megatron-context-default", "megatron-recompute-default"} <= set(ids(found))
    config["megatron_lm_config"]["megatron_lm_recompute_activations"] = True
    assert "ignored-key" in ids(read(config, ARGUMENTS))
    config["megatron_lm_config"]["megatron_lm_context_parallel_size"] = 1
    assert read(config).strategy.dp == 4


def test_processes_that_do_not_fill_the_machines() -> None:
    """17 on 2 machines: accelerate starts 16."""
    assert ids(read(FSDP2 | {"num_processes": 17})) == ["processes-per-node"]
    waiting = read(FSDP2 | {"num_processes": -1})
    assert (waiting.gpus, waiting.strategy.dp, bool(waiting.unread)) == (None, None, True)


@pytest.mark.parametrize(
    "config",
    [
        {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO"},
        MACHINES | {"distributed_type": "XLA"},
        MACHINES | {"distributed_type": "FSDP2"},
    ],
)
def test_other_hardware_is_refused(config: dict[str, Any]) -> None:
    """With what would be read instead."""
    with pytest.raises(InputError) as caught:
        read(config)
    assert caught.value.allowed
    assert caught.value.where is not None
    assert caught.value.where.startswith("config.yaml:")


# --- Arguments alone


def test_arguments_alone_have_the_trainers_defaults() -> None:
    """Eight sequences, no accumulation; the number of GPUs is not theirs."""
    found = read(None, {"output_dir": "out", "per_device_train_batch_size": None, "max_length": 4096})
    s = found.strategy
    assert (s.micro_batch, s.grad_accum, found.seq_len, found.precision, found.gpus) == (8, 1, 4096, "fp32", None)
    assert (s.zero_stage, ids(found)) == (0, ["sharding-elsewhere"])


def test_json_configuration_in_one_line() -> None:
    """accelerate takes JSON by the file's ending, whatever the order of keys."""
    found = read_configuration({"config.json": json.dumps({"num_processes": 8, **FSDP2, "num_machines": 1})})
    assert (found.backend, found.strategy.dp) == ("accelerate-fsdp", 16)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"per_gpu_train_batch_size": 4}, "removed-argument"),
        ({"gradient_accumulation_step": 4}, "unknown-argument"),
        ({"fp16": True}, "precision-twice"),
        ({"gradient_accumulation_steps": 2.5}, "wrong-type"),
        ({"per_device_train_batch_size": 0}, "wrong-type"),
        ({"accelerator_config": {"split_batches": True}}, "split-batches"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}, "accumulation-twice"),
        ({"fsdp": "full_shard quick"}, "fsdp-option"),
        ({"fsdp": ["hybrid_shard"]}, "fsdp-version-spelling"),
    ],
)
def test_argument_findings(change: dict[str, Any], finding: str) -> None:
    """What transformers refuses, or understands otherwise than written."""
    assert finding in ids(read(None, ARGUMENTS | change))


def test_what_is_not_modelled_is_listed() -> None:
    """Compiled blocks, 8-bit optimizers, partial checkpointing."""
    changes = {
        "torch_compile": True,
        "optim": "paged_adamw_8bit",
        "use_liger_kernel": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"every_n_layers": 2},
    }
    found = read(None, ARGUMENTS | changes)
    assert found.strategy.recompute is None
    for name in ("torch_compile", "optim", "use_liger_kernel", "every_n_layers"):
        assert any(name in text for text in found.unread), name


SCRIPT = """
#!/bin/bash
MBS=2
deepspeed --num_gpus 8 train/train_mem.py \\
    --deepspeed ./scripts/zero.json --model_name_or_path org/base --lora_enable False \\
    --data_path data.json --bf16 True --output_dir out \\
    --per-device-train-batch-size $MBS --gradient_accumulation_step=4 \\
    --tf32 True --model_max_length 2048 --gradient_checkpointing True --lazy_preprocess True
"""


def test_arguments_on_the_command_line() -> None:
    """Flags of the script's own stay out; auto in the DeepSpeed file follows the others."""
    found = read_configuration({"finetune.sh": SCRIPT, "zero.json": json.dumps(AUTO)})
    s = found.strategy
    assert (found.backend, found.gpus, found.seq_len, found.precision) == ("accelerate-deepspeed", 8, 2048, "bf16")
    assert (s.micro_batch, s.grad_accum, s.dp, found.global_batch) == (2, 4, 8, 64)
    assert s.recompute == Recompute(mode="full")
    assert (s.zero_stage, s.shard_degree) == (3, 8)
    assert not {"auto-needs-arguments", "unknown-argument"} & set(ids(found))
    variable = SCRIPT.replace("./scripts/zero.json", "$DS")
    named = read_configuration({"finetune.sh": variable, "z.json": json.dumps(AUTO)})
    assert named.strategy.zero_stage == 3


def test_command_line_without_its_files_and_values() -> None:
    """A variable that nobody sets, adapters, and a DeepSpeed file that is not there are named."""
    script = SCRIPT.replace("MBS=2", "").replace("enable False", "enable True").replace("accumulation", "acumulation")
    found = read_configuration({"finetune.sh": script})
    assert (found.strategy.micro_batch, found.strategy.zero_stage, found.precision) == (None, None, "bf16")
    assert "unknown-argument" in ids(found)
    for words in ("per_device_train_batch_size: $MBS", "lora_enable", "zero.json"):
        assert any(words in text for text in found.unread), words


def test_fsdp_on_the_command_line() -> None:
    """torchrun with FSDP by the arguments alone."""
    words = "--per_device_train_batch_size 4 --gradient_accumulation_steps 4 --bf16 "
    words += "--fsdp 'full_shard auto_wrap offload' --fsdp_config '{\"x\": 1}'"
    found = read_configuration({"run.sh": f"torchrun --nproc_per_node=8 train.py {words}"})
    assert (found.backend, found.gpus, found.strategy.zero_stage, found.global_batch) == ("accelerate-fsdp", 8, 3, 128)
    assert found.strategy.offload == Offload(optimizer=1.0, parameters="cpu", device="cpu")


def test_command_line_in_no_command() -> None:
    """Flags that nothing starts."""
    with pytest.raises(InputError, match="no command"):
        read_configuration({"run.sh": "echo --per_device_train_batch_size 4"})


def test_lists_of_names_do_not_overlap() -> None:
    """A removed or inherited argument is none of the present ones."""
    assert not keys.ARGUMENTS & keys.REMOVED_ARGUMENTS.keys()
    assert not keys.ARGUMENTS & keys.SUBCLASS_ARGUMENTS
    assert all(not new or new in keys.ARGUMENTS for new in keys.REMOVED_ARGUMENTS.values())
    assert len(keys.ARGUMENTS) == 114, "fields of TrainingArguments 5.23"


# --- Files of other tools

RECIPES = {
    "axolotl": "base_model: org/base\nsequence_len: 4096\nmicro_batch_size: 1\nfsdp:\n  - full_shard\ndeepspeed:\n",
    "LLaMA-Factory": "model_name_or_path: org/base\nfinetuning_type: full\ncutoff_len: 8192\nbf16: true\n",
    "DeepSpeed-Chat": "deepspeed main.py --zero_stage 3 \\\n --per_device_train_batch_size 4 "
    "--model_name_or_path org/base --deepspeed\n",
    "GPT-NeoX": '{\n  "pipe_parallel_size": 2,\n  "model_parallel_size": 2, "hidden-size": "org/base",\n'
    '  "zero_optimization": {"stage": 1}\n}\n',
    "OpenRLHF": "deepspeed --module openrlhf.cli.train_sft --ds.zero_stage 2 --model.model_name_or_path org/base\n",
    "ms-swift": "NPROC_PER_NODE=8 megatron sft \\\n  --model org/base --tensor_model_parallel_size 4\n",
    "slime": "python3 train.py --hf-checkpoint org/base --rollout-batch-size 32 --tensor-model-parallel-size 2\n",
    "llamafactory-cli": "llamafactory-cli train \\\n --model_name_or_path org/base --finetuning_type lora\n",
    "verl": "python3 -m verl.trainer.main_ppo \\\n  +actor_rollout_ref.model.path=$MODEL trainer.nnodes=2\n",
}


@pytest.mark.parametrize("tool", RECIPES)
def test_recipes_are_named_and_refused(tool: str) -> None:
    """The error says what the file is, what stands in it, and what to give instead."""
    text = RECIPES[tool]
    name = "recipe.json" if text.startswith("{") else "run.sh" if " --" in text or tool == "verl" else "recipe.yaml"
    with pytest.raises(InputError) as caught:
        read_configuration({name: RECIPES[tool]})
    error = caught.value
    assert {"llamafactory-cli": "LLaMA-Factory"}.get(tool, tool) in error.message
    assert error.where == name
    assert error.allowed
    assert error.hint is not None
    assert error.got is not None
    assert ("= 2" if tool == "verl" else "org/base") in error.got
    command = {
        "axolotl": "--backend fsdp --model base --seq-len 4096 --micro-batch 1",
        "LLaMA-Factory": "--backend fsdp --model base --seq-len 8192",
        "llamafactory-cli": "--backend fsdp --model base",
        "DeepSpeed-Chat": "--backend deepspeed --model base --micro-batch 4 --zero-stage 3",
        "GPT-NeoX": "--backend megatron --model MODEL --pp 2 --tp 2",
        "OpenRLHF": "--backend deepspeed --model base --zero-stage 2",
        "ms-swift": "--backend megatron --model base --tp 4",
        "slime": "--backend megatron --model base --tp 2",
        "verl": "--backend fsdp --model MODEL",
    }[tool]
    assert error.hint.startswith(f"`planner estimate {command} --gpu GPU --gpus N` prices the strategy")
    assert ("adapters (lora)" in error.hint) == (tool == "llamafactory-cli")


def test_recipes_that_name_a_deepspeed_file() -> None:
    """The file decides, so it is what to check; nothing of a recipe is more than a word of the command; adapters are
    not promised."""
    text = "model_name_or_path: a;b\nfinetuning_type: lora\ncutoff_len: 2048\ndeepspeed: ds_z3.json\n"
    with pytest.raises(InputError) as caught:
        read_configuration({"recipe.yaml": text})
    command = "planner check ds_z3.json --model 'a;b' --seq-len 2048 --gpu GPU --gpus N"
    assert (
        caught.value.hint == f"`{command}` prices the strategy; that is of all weights: adapters (lora) are not planned"
    )


@pytest.mark.parametrize(
    ("tool", "more", "said"),
    [
        ("axolotl", "tensor_parallel_size: 2\ndp_shard_size: 4\nfp8: true\n", ("2 (tp)", "4 (GPUs of", "fp8 = true")),
        ("axolotl", "fsdp_config:\n  offload_params: true\n", ("offload_params = true", "fsdp = full_shard")),
        ("LLaMA-Factory", "pipeline_model_parallel_size: 4\nexpert_model_parallel_size: 2\n", ("4 (pp)", "2 (ep)")),
        ("LLaMA-Factory", "quantization_bit: 4\nper_device_train_batch_size: 1\n", ("= 4 (bits", "= 1 (--micro")),
    ],
)
def test_recipes_tell_every_degree(tool: str, more: str, said: tuple[str, ...]) -> None:
    """Degrees, precision and offload stand in the error; what is off or commented out does not."""
    with pytest.raises(InputError) as caught:
        read_configuration({"recipe.yaml": RECIPES[tool] + more + "load_in_8bit: false\n# context_parallel_size: 8\n"})
    assert caught.value.got is not None
    assert all(text in caught.value.got for text in said), caught.value.got
    assert "8" not in caught.value.got.replace("8192", "").replace("fp8", "")


def test_a_recipe_beside_accelerates_file_is_not_passed_over() -> None:
    """accelerate's file is read; the tool's own is named with what it says."""
    found = read_configuration({"a.yaml": yaml.safe_dump(with_fsdp()), "sft.yaml": RECIPES["LLaMA-Factory"]})
    told = next(finding for finding in found.findings if finding.id == "recipe-not-read")
    assert "cutoff_len = 8192" in told.got


TRL_SCRIPT = """
# Arguments of the model
model_name_or_path: org/base
torch_dtype: bfloat16
dataset_name: org/data
bf16: true
gradient_checkpointing: true
gradient_accumulation_steps: 4
per_device_train_batch_size: 2
max_prompt_length: 512
max_completion_length: 1536
use_peft: true
reward_funcs: [accuracy]
output_dir: out
"""


def test_arguments_of_a_script_in_yaml() -> None:
    """Batch, precision, recomputation, model and task; the names of other classes are no mistakes, a misspelling is.
    Alone the file leaves the sharding open."""
    alone = read_configuration({"sft.yaml": TRL_SCRIPT})
    s = alone.strategy
    assert (s.micro_batch, s.grad_accum, s.recompute) == (2, 4, Recompute(mode="full"))
    assert (alone.model_name, alone.task, alone.seq_len, alone.precision) == ("org/base", "lora", 2048, "bf16")
    assert (s.zero_stage, ids(alone)) == (None, ["sharding-elsewhere"])
    wrong = read_configuration({"sft.yaml": TRL_SCRIPT + "gradient_checkpoint: true\n"})
    assert "gradient_checkpointing" in next(f.hint for f in wrong.findings if f.id == "unknown-argument")
    launched = read_configuration({"a.yaml": yaml.safe_dump(with_fsdp()), "sft.yaml": TRL_SCRIPT})
    assert (launched.backend, launched.strategy.micro_batch) == ("accelerate-fsdp", 2)
    assert (launched.strategy.zero_stage, launched.model_name) == (3, "org/base")


def test_json_of_a_script_is_shared_too() -> None:
    """One JSON file fills the arguments of model, data and training (HfArgumentParser.parse_json_file)."""
    shared = ARGUMENTS | {"model_name_or_path": "org/base", "dataset_name": "org/data", "fsdp": "full_shard"}
    found = read_configuration({"run.json": json.dumps(shared)})
    assert found.model_name == "org/base"
    assert "unknown-argument" not in ids(found)
    alone = ARGUMENTS | {"dataset_name": "org/data", "fsdp": "full_shard"}
    assert "unknown-argument" in ids(read_configuration({"run.json": json.dumps(alone)}))


# --- Whatever the bytes


def mutated(text: str, chooser: random.Random) -> str:
    """A text with some characters changed, cut or doubled."""
    letters = list(text)
    for _ in range(chooser.randint(1, 12)):
        place = chooser.randrange(len(letters) + 1)
        match chooser.randrange(4):
            case 0:
                letters[place:place] = chooser.choice(
                    ["{", "[", ": ", "\n", "&a ", "*a", "\x00", "'", "9" * 40, "-", "\t", "é", "!!int x"]
                )
            case 1:
                del letters[place : place + chooser.randint(1, 9)]
            case 2:
                letters[place:place] = letters[place : place + 40]
            case _:
                letters[place : place + 1] = chr(chooser.randint(1, 300))
    return "".join(letters)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_no_bytes_end_in_a_traceback(reader: Any) -> None:
    """Every text is read or refused with an InputError."""
    chooser = random.Random(5)
    config = yaml.safe_dump(
        with_fsdp(fsdp_offload_params="no") | {"parallelism_config": {"parallelism_config_cp_size": 2}}
    )
    texts = [
        config,
        yaml.safe_dump(deepspeed(zero_stage=3)),
        json.dumps(ARGUMENTS | {"deepspeed": AUTO}),
        *RECIPES.values(),
    ]
    for _ in range(400):
        files = {
            "config.yaml": mutated(chooser.choice(texts), chooser),
            "training_arguments.json": mutated(texts[2], chooser),
            "plan_setup.py": mutated("SEQ_LEN = 4096\nATTENTION = 'sdpa'\n", chooser),
        }
        with suppress(InputError):
            assert isinstance(reader.read(files), Configuration)


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: FSDP\na: " + "[" * 3000,
        "distributed_type: FSDP\na: &a [x, x]\n"
        + "".join(f"b{i}: &b{i} [*{p}, *{p}]\n" for i, p in enumerate(["a", *(f"b{k}" for k in range(30))])),
        "distributed_type: FSDP\nfsdp_config: 7\nparallelism_config: [1]\nnum_processes: 1e400\n",
        "distributed_type: {a: b}\n",
        "distributed_type: FSDP\nnum_processes: 2026-99-99\n",
        "",
        "distributed_type",
    ],
    ids=["deep", "aliases", "types", "mapping", "date", "empty", "bare"],
)
def test_hostile_yaml(text: str) -> None:
    """Depth, multiplying aliases and values of the wrong kind."""
    try:
        found = read_configuration({"config.yaml": text})
    except InputError:
        return
    assert found.findings
