"""Lets accelerate and transformers themselves read rendered folders on a CPU: a JSON case a line in, a verdict a line
out.

A case names a folder and the arguments of ``accelerate launch``.  It passes accelerate's loader, launch validation,
plugins and mesh, the Trainer's arguments and batch arithmetic, accelerate's data loader on every rank, and
DeepSpeedConfig; a forked child takes each case, so that no state leaks to the next.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29556", LOCAL_WORLD_SIZE="1")
os.environ.update(
    DS_ACCELERATOR="cpu", DS_SKIP_CUDA_CHECK="1", RANK="0", LOCAL_RANK="0", TOKENIZERS_PARALLELISM="false"
)
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

import deepspeed
import torch
import torch.distributed as dist
import yaml
from accelerate import data_loader, utils
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import launch as environment
from accelerate.utils.dataclasses import DistributedType
from deepspeed.runtime.config import DeepSpeedConfig
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Trainer, TrainingArguments

NESTED = {
    "fsdp_config": "fsdp_",
    "fp8_config": "fp8_",
    "dynamo_config": "dynamo_",
    "parallelism_config": "",
    "deepspeed_config": "",
    "megatron_lm_config": "",
}
"""Sections of the YAML file with the prefix that the launcher puts before a key that lacks it."""

MOST_RANKS = 32
"""Beyond this the data loaders of all ranks take too long to build."""


def stand_in() -> None:
    """Answers that need an accelerator: bf16 and fp8 exist, ports are free, no op is compiled."""
    torch.cuda.is_bf16_supported = lambda *_args, **_options: True
    launch.is_bf16_available = lambda *_args, **_options: True
    environment.is_fp8_available = lambda: True
    environment.is_port_in_use = lambda _port: False
    # deepspeed.comm.torch as an attribute may be torch itself.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def ignored_keys(config: dict[str, Any], known: set[str]) -> list[str]:
    """Nested keys that no launch argument takes: accelerate sets them and nobody reads them."""
    ignored = []
    for section, prefix in NESTED.items():
        for key in config.get(section) or {}:
            name = key if not prefix or key.startswith(prefix.rstrip("_")) else prefix + key
            if name not in known:
                ignored.append(f"{section}.{key}")
    return ignored


def launched(case: dict[str, Any], verdict: dict[str, Any]) -> Any:
    """The launcher's own reading of its arguments and of the file, exported as it would be to every process."""
    parser = launch.launch_command_parser()
    arguments = parser.parse_args(case["argv"])
    raw = yaml.safe_load(Path(arguments.config_file).read_text(encoding="utf-8"))
    verdict["ignored"] = ignored_keys(raw, {action.dest for action in parser._actions})
    verdict["type"] = str(load_config_from_file(arguments.config_file).distributed_type.value)
    arguments, defaults, stated = launch._validate_launch_command(arguments)
    if arguments.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if stated else [])]
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
        command, exported = environment.prepare_deepspeed_cmd_env(arguments)
        verdict["command"] = command
    else:
        exported = environment.prepare_multi_gpu_env(arguments)
    os.environ.update(exported)
    os.environ.update(WORLD_SIZE=str(arguments.num_processes))
    for name in ("nnodes", "nproc_per_node", "node_rank", "rdzv_backend", "rdzv_endpoint"):
        verdict[name] = str(getattr(arguments, name, None))
    return arguments


def meshed(arguments: Any, plugin: Any, kind: DistributedType) -> tuple[ParallelismConfig | None, Any]:
    """accelerate's parallelism configuration and device mesh, validated as Accelerator does."""
    if not arguments.use_parallelism_config:
        return None, None
    config = ParallelismConfig()
    accelerator = SimpleNamespace(
        multi_device=kind != DistributedType.DEEPSPEED,
        num_processes=int(arguments.num_processes),
        is_main_process=True,
        is_fsdp2=bool(plugin and plugin.fsdp_version == 2),
        distributed_type=kind,
    )
    mesh = config.get_device_mesh("cpu") if config.sp_size == 1 else config.build_device_mesh("cpu")
    config._validate_accelerator(accelerator)
    return config, mesh


def total_batch(arguments: TrainingArguments, gpus: int, config: ParallelismConfig | None) -> int:
    """Sequences of a step as the Trainer counts them."""
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(parallelism_config=config),
        model=SimpleNamespace(),
        is_deepspeed_enabled=getattr(arguments, "hf_deepspeed_config", None) is not None,
        args=arguments,
        _train_batch_size=arguments.per_device_train_batch_size,
    )
    for name in ("get_tp_size", "get_cp_size", "get_sp_size"):
        setattr(trainer, name, getattr(Trainer, name).__get__(trainer))
    counted = SimpleNamespace(world_size=gpus, gradient_accumulation_steps=arguments.gradient_accumulation_steps)
    return int(Trainer.get_total_train_batch_size(trainer, counted))


def distinct_samples(micro: int, gpus: int, kind: DistributedType, mesh: Any) -> int:
    """Different samples that all ranks together draw as their first batch from accelerate's data loader."""
    drawn: set[int] = set()
    source = torch.utils.data.DataLoader(range(micro * gpus * 2), batch_size=micro)
    for rank in range(gpus):
        data_loader.PartialState = lambda rank=rank: SimpleNamespace(
            num_processes=gpus, process_index=rank, distributed_type=kind, device=torch.device("cpu")
        )
        shard = data_loader.prepare_data_loader(source, put_on_device=False, torch_device_mesh=mesh)
        drawn.update(index for index in next(iter(shard.batch_sampler)))
    return len(drawn)


def check_deepspeed(arguments: TrainingArguments, config: ParallelismConfig | None, gpus: int) -> dict[str, Any]:
    """The Trainer's comparison of its arguments with DeepSpeed's file, and DeepSpeed's own batch arithmetic."""
    handle = arguments.hf_deepspeed_config
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=4096))
    handle.trainer_config_finalize(arguments, model, 1000)
    settings = dict(handle.config)
    replicas = gpus
    if config is not None and config.sp_size > 1:
        # accelerator.py, _prepare_deepspeed
        settings["train_batch_size"] = (
            settings["train_micro_batch_size_per_gpu"]
            * settings["gradient_accumulation_steps"]
            * config.data_parallel_size
        )
        replicas = gpus // config.sp_size
    groups = SimpleNamespace(get_data_parallel_world_size=lambda: replicas)
    read = DeepSpeedConfig(settings, groups)
    return {"deepspeed_batch": read.train_batch_size, "zero_stage": read.zero_config.stage}


def examine(case: dict[str, Any], verdict: dict[str, Any]) -> None:
    """Every stage of one case; ``verdict`` says how far it came."""
    os.chdir(case["folder"])
    verdict["stage"] = "launch"
    launch_arguments = launched(case, verdict)
    gpus = int(launch_arguments.num_processes)
    kind = DistributedType.DEEPSPEED if launch_arguments.use_deepspeed else DistributedType.FSDP
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
    deepspeed.comm.init_distributed(dist_backend="fake")
    verdict["stage"] = "plugins"
    plugin = None
    if launch_arguments.use_fsdp:
        plugin = utils.FullyShardedDataParallelPlugin()
        if launch_arguments.mixed_precision != "no":
            plugin.set_mixed_precision(launch_arguments.mixed_precision)
        verdict["fsdp"] = {
            "version": plugin.fsdp_version,
            "reshard": plugin.reshard_after_forward,
            "offload": type(plugin.cpu_offload).__name__,
            "checkpointing": plugin.activation_checkpointing,
            "reduce": str(getattr(plugin.mixed_precision_policy, "reduce_dtype", None)),
        }
    if launch_arguments.use_deepspeed:
        verdict["deepspeed"] = {"stage": utils.DeepSpeedPlugin().zero_stage}
    if launch_arguments.use_megatron_lm:
        utils.MegatronLMPlugin()
    verdict["stage"] = "mesh"
    config, mesh = meshed(launch_arguments, plugin, kind)
    verdict["sizes"] = dict(config._sizes) if config is not None else {}
    if config is not None and config.tp_size > 1:
        verdict["stage"] = "tensor"
        # The first thing that Accelerator._prepare_tp does with a model whose parameters are split.
        importlib.import_module("transformers.integrations.tensor_parallel").ReplicateParallel  # noqa: B018
    verdict["stage"] = "trainer"
    setup = runpy.run_path("plan_setup.py")
    arguments = setup["training_arguments"](use_cpu=True)
    batch = setup["collate"]([{"input_ids": [0] * setup["SEQ_LEN"]}])
    verdict["seq_len"] = batch["input_ids"].shape[1]
    verdict["precision"] = arguments.mixed_precision
    verdict["checkpointing"] = bool(arguments.activation_checkpointing or (plugin and plugin.activation_checkpointing))
    verdict["sync_each_batch"] = bool(
        (arguments.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch")
    )
    verdict["total_batch"] = total_batch(arguments, gpus, config)
    if launch_arguments.use_deepspeed:
        verdict["stage"] = "deepspeed"
        verdict |= check_deepspeed(arguments, config, gpus)
        size = arguments.hf_deepspeed_config.config.get("tensor_parallel", {}).get("autotp_size", 0)
        if size > 1:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    verdict["stage"] = "data"
    if gpus <= MOST_RANKS:
        verdict["distinct"] = distinct_samples(arguments.per_device_train_batch_size, gpus, kind, mesh)


def judged(case: dict[str, Any]) -> dict[str, Any]:
    """The verdict of one case."""
    verdict: dict[str, Any] = {"id": case["id"], "ok": False, "stage": "yaml"}
    try:
        examine(case, verdict)
        verdict |= {"ok": True, "stage": "done"}
    except (Exception, SystemExit) as error:
        frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        verdict["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        verdict["where"] = next((frame for frame in reversed(frames) if "site-packages" in frame), frames[-1])
    return verdict


def main() -> None:
    stand_in()
    for line in sys.stdin:
        case = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            # DeepSpeed writes to standard output.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            with os.fdopen(writer, "w") as out:
                out.write(json.dumps(judged(case), default=str))
                out.flush()
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        print(text or json.dumps({"id": case["id"], "ok": False, "stage": "crash"}), flush=True)


if __name__ == "__main__":
    main()
