"""Lets DeepSpeed itself read rendered folders on a CPU: one JSON case a line in, one JSON verdict a line out.

A case names a folder with ds_config.json (and, for the engine, parallel_setup.py), the number of GPUs and the degrees.
``DeepSpeedConfig`` reads the file as the engine would; with ``engine`` the folder's own ``parallel_setup`` then starts
a small stand-in model as rank 0 of a group that only pretends to have that many ranks.  Every case runs in a forked
child, so that process groups and DeepSpeed's module state never leak from one case to the next.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", DS_SKIP_CUDA_CHECK="1", RANK="0", LOCAL_RANK="0")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555", TOKENIZERS_PARALLELISM="false")
logging.disable(logging.WARNING)

# DeepSpeed looks at the environment and at the log level while it is imported.
import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

HEAD_DIM = 2

# By name: as an attribute of deepspeed.comm, "torch" is PyTorch itself.
comm_backend = importlib.import_module("deepspeed.comm.torch")


def adam_without_kernel(self: Any, params: Any, lr: float = 1e-3, **others: Any) -> None:
    """Initialise one of DeepSpeed's own Adam classes without the kernels, which would have to be compiled."""
    known: dict[str, Any] = {key: others[key] for key in ("betas", "eps", "weight_decay") if key in others}
    torch.optim.Optimizer.__init__(self, params, {"lr": lr, "bias_correction": True, "amsgrad": False, **known})


class ReplicaGroups:
    """What DeepSpeedConfig asks of the groups of a pipeline or of Ulysses."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def get_data_parallel_world_size(self) -> int:
        return self.replicas


def stand_in(case: dict[str, Any]) -> torch.nn.Module:
    """A Llama of two layers with the heads of the plan's model, each two elements wide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HEAD_DIM * case["heads"],
        head_dim=HEAD_DIM,
        intermediate_size=16 * case["tp"],
        num_hidden_layers=2,
        num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"],
        vocab_size=64,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def pretend_kernels() -> None:
    """Replace what would be compiled or needs a GPU: Adam kernels, the shared-memory collectives, flash attention."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    comm_backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
    # CPUs of this kind have no fp16 arithmetic; nothing is multiplied here.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    for adam in (FusedAdam, DeepSpeedCPUAdam):
        adam.__init__ = adam_without_kernel
        adam.step = lambda self, *_, **__: None  # the states are set up by a step over zero gradients
        adam.__del__ = lambda self: None
    ALL_ATTENTION_FUNCTIONS.register("flash_attention_2", ALL_ATTENTION_FUNCTIONS["sdpa"])


def load_setup(folder: Path) -> Any:
    """The rendered parallel_setup.py as a module."""
    spec = importlib.util.spec_from_file_location("parallel_setup", folder / "parallel_setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_config(case: dict[str, Any], verdict: dict[str, Any]) -> None:
    """DeepSpeed's own configuration class over the file, with the groups that the engine would hand to it."""
    groups = None
    if case["pp"] * case["sp"] > 1:
        groups = ReplicaGroups(case["gpus"] // (case["pp"] * case["sp"]))
    config = DeepSpeedConfig(str(Path(case["folder"]) / "ds_config.json"), groups)
    verdict["batch"] = [
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    ]


def start_engine(case: dict[str, Any], verdict: dict[str, Any]) -> None:
    """What the training script of the plan does, up to the engine."""
    pretend_kernels()
    setup = load_setup(Path(case["folder"]))
    if case["pp"] > 1:
        from deepspeed.pipe import LayerSpec

        width = 4
        layers = [LayerSpec(torch.nn.Linear, width, width) for _ in range(case["layers"])]
        model = setup.pipeline(layers, torch.nn.functional.mse_loss, torch.nn.Linear)
        verdict["parts"] = [int(part) for part in model.parts]
        engine = setup.initialize(model)
    else:
        model = stand_in(case)
        if hasattr(setup, "mark_experts"):
            setup.mark_experts(model, type(model.model.layers[0].mlp))
        if case["sp"] > 1:
            if setup.ATTENTION == "flash_attention_2":
                model.config._attn_implementation = "flash_attention_2"
            engine = setup.initialize(model, setup.register_ulysses(model))
        else:
            engine = setup.initialize(model)
    verdict["engine"] = type(engine).__name__
    verdict["optimizer"] = type(engine.optimizer).__name__
    verdict["stage"] = int(engine.zero_optimization_stage())
    # With Ulysses the engine counts sequence and data ranks together, which is what ZeRO shards over.
    replicas, sharding = engine.dp_world_size, engine.seq_dp_world_size
    verdict["replicas"] = int(sharding // case["sp"] if replicas is None else replicas)
    verdict["sharding"] = int(sharding)
    verdict["grad_accum"] = int(engine.gradient_accumulation_steps())
    verdict["micro_batch"] = int(engine.train_micro_batch_size_per_gpu())


def judge(case: dict[str, Any]) -> dict[str, Any]:
    """Accepted or refused, with DeepSpeed's words and the line of DeepSpeed that said them."""
    verdict: dict[str, Any] = {"name": case["name"], "ok": False}
    try:
        os.environ["WORLD_SIZE"] = str(case["gpus"])
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["gpus"])
        comm_backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
        deepspeed.comm.init_distributed(dist_backend="fake")
        read_config(case, verdict)
        if case["engine"]:
            start_engine(case, verdict)
        verdict["ok"] = True
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        libraries = [frame for frame in frames if "site-packages/" in frame.filename]
        last = (libraries or frames)[-1]
        verdict["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        verdict["raised_at"] = f"{last.filename.split('site-packages/')[-1]}:{last.lineno}"
    return verdict


def in_child(case: dict[str, Any]) -> Any:
    """``judge`` in a forked process; its standard output, which DeepSpeed writes to, goes nowhere."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        verdict = judge(case)
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(verdict))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"name": case["name"], "ok": False, "error": "the child process died"}


def main() -> None:
    """Read every case, then judge one after the other."""
    torch.set_num_threads(1)
    cases = [json.loads(line) for line in sys.stdin if line.strip()]
    if any(case["engine"] for case in cases):
        import transformers.models.llama.modeling_llama  # noqa: F401  (loaded once, before the forks)
    say({"deepspeed": deepspeed.__version__, "torch": torch.__version__})
    for case in cases:
        say(in_child(case))


def say(document: dict[str, Any]) -> None:
    """One JSON document a line on standard output, at once."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
