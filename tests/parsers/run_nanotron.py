"""Feeds configurations to nanotron's own loader: cases as JSON on standard input, one JSON result a line.

Run by test_nanotron.py in an interpreter that has torch, dacite, datasets and transformers, with the checkout of
nanotron in PLANNER_NANOTRON_PATH.  nanotron's own code does the reading (get_config_from_file, Config.__post_init__);
packages for GPUs that its modules import at their top (triton, flash_attn, grouped_gemm) are inert stand-ins.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock


def empty_module(name: str) -> type:
    """A torch module that takes any arguments."""
    from torch import nn

    return type(name, (nn.Module,), {"__init__": lambda self, *_arguments, **_keywords: nn.Module.__init__(self)})


class StandIn(types.ModuleType):
    """A module with any attribute; none of them does anything."""

    __path__: list[str] = []
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Modules (written as classes are) get derived from and put into models; they have no parameters.
        value = empty_module(name) if name[0].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports stand-ins for the named packages and everything below them."""

    def __init__(self, *packages: str) -> None:
        self.packages = set(packages)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: attributes come to be when they are asked for."""


def loader() -> Any:
    """nanotron's get_config_from_file."""
    checkout = Path(os.environ["PLANNER_NANOTRON_PATH"])
    sys.path.insert(0, str(checkout / "src" if (checkout / "src").is_dir() else checkout))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    # torch must find out by itself that there is no triton before the stand-in pretends otherwise.
    import torch._dynamo
    import torch._inductor.runtime.triton_compat  # noqa: F401

    sys.meta_path.append(Finder("flash_attn", "grouped_gemm", "triton"))
    from nanotron.config import get_config_from_file

    return get_config_from_file


def outcome(load: Any, text: str) -> dict[str, Any]:
    """What the loader made of a configuration, or what it said against it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        try:
            config = load(file.name)
        except Exception as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
    parallel, model = config.parallelism, config.model.model_config
    return {
        "ok": True,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "dp": parallel.dp,
        "cp": parallel.context_parallel_size,
        "engine": type(parallel.pp_engine).__name__,
        "mode": parallel.tp_mode.name,
        "recompute": parallel.recompute_layer,
        "zero": config.optimizer.zero_stage if config.optimizer else None,
        "global_batch": config.global_batch_size if config.tokens else None,
        "tokens": config.global_batch_size_in_tokens if config.tokens else None,
        "model": type(model).__name__,
        "layers": getattr(model, "num_hidden_layers", None),
        "dtype": str(config.model.dtype),
    }


def built(load: Any, text: str, rank: int) -> tuple[Any, Any]:
    """The configuration, and nanotron's own model of it on meta tensors as one rank of a pretended job."""
    import torch
    from nanotron.helpers import _vocab_size_with_padding
    from nanotron.models import llama, qwen
    from nanotron.models.base import build_model
    from nanotron.parallel.context import ParallelContext
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        config = load(file.name)
    degrees, sizes = config.parallelism, config.model.model_config
    world = degrees.tp * degrees.pp * degrees.dp * degrees.context_parallel_size
    rank, local = rank % world, min(8, world)
    places = {"WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    os.environ.update({name: str(value) for name, value in places.items()} | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    # What needs a GPU: choosing the device, and the buffers of point-to-point transfers.
    ParallelContext.set_device = lambda self: None
    llama.P2P = qwen.P2P = lambda pg, device: types.SimpleNamespace(pg=pg)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    context = ParallelContext(degrees.tp, degrees.pp, degrees.dp, degrees.context_parallel_size)
    sizes.vocab_size = _vocab_size_with_padding(
        sizes.vocab_size, context.tp_pg.size(), config.model.make_vocab_size_divisible_by
    )
    classes = {"LlamaConfig": llama.LlamaForTraining, "Qwen2Config": qwen.Qwen2ForTraining}
    model = build_model(
        lambda: classes[type(sizes).__name__](sizes, context, degrees, random_states=None),
        context,
        config.model.dtype,
        device=torch.device("meta"),
    )
    return config, model


def built_stages(load: Any, text: str, rank: int) -> dict[str, Any]:
    """Parameters of the rank, and layers of each stage."""
    from nanotron.parallel.pipeline_parallel.block import PipelineBlock

    config, model = built(load, text, rank)
    blocks = [b for name, b in model.named_modules() if isinstance(b, PipelineBlock) and ".decoder." in name]
    stages = [block.rank for block in blocks]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": [stages.count(stage) for stage in range(config.parallelism.pp)],
    }


def between_stages(load: Any, text: str) -> dict[str, Any]:
    """The forward pass as the pipeline engine calls it on the second of several ranks, all of them stages: it holds
    pointers, no data."""
    from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer

    config, model = built(load, text, 1)
    names = ("input_ids", "input_mask" if type(config.model.model_config).__name__ == "LlamaConfig" else "position_ids")
    # The layers of this rank would compute: only those of others are passed through.
    model.model.decoder = type(model.model.decoder)(block for block in model.model.decoder if block.rank != 1)
    try:
        model.model(**{name: TensorPointer(group_rank=0) for name in names})
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
    return {"ok": True}


def main() -> None:
    """``{"load": {name: text}, "build": [[name, text, rank], ...], "between": {name: text}}``."""
    wanted, load = json.load(sys.stdin), loader()
    for name, text in wanted.get("load", {}).items():
        print(json.dumps({"name": name, **outcome(load, text)}), flush=True)
    for name, text, rank in wanted.get("build", []):
        print(json.dumps({"name": name, "rank": rank, **built_stages(load, text, rank)}), flush=True)
    for name, text in wanted.get("between", {}).items():
        print(json.dumps({"name": name, **between_stages(load, text)}), flush=True)


if __name__ == "__main__":
    main()
