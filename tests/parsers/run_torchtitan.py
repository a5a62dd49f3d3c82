"""Feeds configurations to torchtitan's own parser, meshes and parallelisation on a CPU, many in one process.

Reads JSON lines ``{"name", "folder", "arguments", "gpus", "ranks"}`` from standard input and writes one JSON line each:
``{"name", "ok", "stage", "error", "total", "held": {rank: parameters}, "stages": {rank: chunks}, "read": {...}}``.
Everything is torchtitan's own code on meta tensors, with a fake process group; only the sequence and batch checks of
``Trainer.__init__`` are repeated here, because building a trainer needs a GPU.  Stand-ins: triton (which has no CPU
build), the compute capability that float8 asks for, and "cpu" as the device of the meshes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any


class _Anything:
    """Stands for every object of a package that is only named, never run."""

    def __call__(self, *values: Any, **named: Any) -> Any:
        # Used as a decorator it hands the function back.
        return values[0] if len(values) == 1 and callable(values[0]) and not named else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, key: Any) -> Any:
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __add__ = __mul__ = __or__


class _EmptyModule(types.ModuleType):
    __version__ = "0.0"
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of one package and everything below it."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.split(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def prepare() -> None:
    """Import torchtitan on a machine without GPU."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    try:
        import triton  # noqa: F401
    except ImportError:
        # torch looks for triton once, here, and has to find that there is none.
        import torch._inductor.compile_fx
        import torch._inductor.runtime.triton_compat  # noqa: F401

        sys.meta_path.append(_StandIn("triton"))
    import torchtitan.components.quantization.float8 as float8
    from torchtitan.distributed import parallel_dims

    float8.has_cuda_capability = lambda *_level: True
    parallel_dims.device_type = "cpu"


def check(case: dict[str, Any]) -> dict[str, Any]:
    """What torchtitan says of one configuration."""
    result: dict[str, Any] = {"name": case["name"], "ok": False, "stage": "arguments", "error": None}
    folder = case["folder"]
    sys.path.insert(0, folder)
    try:
        for rank in case["ranks"]:
            _one_rank(case, rank, result)
        result |= {"ok": True, "stage": "done"}
    except (Exception, SystemExit) as problem:
        result["error"] = " ".join(f"{type(problem).__name__}: {problem}".split())[:400]
    finally:
        sys.path.remove(folder)
        sys.modules.pop("plan_config", None)
        importlib.invalidate_caches()
    return result


def _one_rank(case: dict[str, Any], rank: int, result: dict[str, Any]) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    result["stage"] = "arguments"
    sys.modules.pop("plan_config", None)
    config = ConfigManager().parse_args(list(case["arguments"]))
    result["stage"] = "degrees"
    dims = ParallelDims.from_config(config.parallelism, case["gpus"])
    result["stage"] = "trainer"
    result["read"] = _trainer_checks(config, dims)
    result["stage"] = "mesh"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case["gpus"])
    try:
        dims.build_mesh()
        result["stage"] = "model"
        _parallelize(config, dims, rank, result)
    finally:
        dist.destroy_process_group()


def _trainer_checks(config: Any, dims: Any) -> dict[str, Any]:
    """The sequence and batch rules of Trainer.__init__ (torchtitan/trainer.py 0.3.0) and what they compute."""
    parallelism, training = config.parallelism, config.training
    divisor = (dims.tp if parallelism.enable_sequence_parallel else 1) * (2 * dims.cp if dims.cp > 1 else 1)
    if training.seq_len % divisor:
        raise ValueError(f"Training sequence length ({training.seq_len}) must be divisible by {divisor}")
    replicas = dims.dp_replicate * dims.dp_shard
    step = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * replicas
    if step % (training.local_batch_size * replicas):
        raise ValueError(f"global batch size {step} % ({training.local_batch_size} * {replicas}) != 0")
    pieces = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else 1
    return {
        "dp_replicate": dims.dp_replicate,
        "dp_shard": dims.dp_shard,
        "grad_accum": step // (training.local_batch_size * replicas) * pieces,
        "loss": type(config.loss).__qualname__,
        "recompute": type(config.activation_checkpoint).__qualname__,
        "compile": config.compile.enable,
        "seq_len": training.seq_len,
    }


def _parallelize(config: Any, dims: Any, rank: int, result: dict[str, Any]) -> None:
    import torch
    from torchtitan.distributed import utils

    utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    result["total"] = sum(parameter.numel() for parameter in model.parameters())
    options = {
        "parallel_dims": dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": ".",
    }
    if dims.pp_enabled:
        _, parts, _, _ = spec.pipelining_fn(
            model,
            device=torch.device("cpu"),
            model_config=spec.model,
            parallelize_fn=spec.parallelize_fn,
            loss_fn=lambda *_values: (0, 0),
            **options,
        )
    else:
        parts = [spec.parallelize_fn(model, **options)]
    for part in parts:
        if part.enable_weight_tying:
            # As Decoder.init_states does: splitting over tp made two parameters of one.
            part.tok_embeddings.weight = part.lm_head.weight
    held = [getattr(p, "_local_tensor", p).numel() for part in parts for p in part.parameters()]
    result.setdefault("held", {})[str(rank)] = sum(held)
    result.setdefault("stages", {})[str(rank)] = [
        sum(1 for name, _ in part.named_children() if name == "layers") and len(part.layers) for part in parts
    ]


def main() -> None:
    prepare()
    for line in sys.stdin:
        if line.strip():
            sys.stdout.write(json.dumps(check(json.loads(line))) + "\n")
            sys.stdout.flush()
    # Threads of fake groups outlive the interpreter otherwise.
    os._exit(0)


if __name__ == "__main__":
    main()
