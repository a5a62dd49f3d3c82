"""Imports rendered FSDP2 modules as one rank of a pretended job: cases as JSON on standard input, one result a line.

Run by test_fsdp.py in an interpreter with torch.  A fake process group has the plan's world size, and the model lies on
meta tensors, so meshes and shards are those of the real job and nothing is computed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

warnings.simplefilter("ignore")


def imported(name: str, path: Path) -> types.ModuleType:
    """A module from a file, under the name by which the example script imports it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def parallelized(files: dict[str, str], size: dict[str, int] | None, world: int, rank: int) -> dict[str, Any]:
    """Mesh, shards and checkpoints that the module makes of the example's model, as ``rank`` of ``world``."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("parallelize.py", "example_train.py"):
            Path(folder, name).write_text(files[name])
        plan = imported("parallelize", Path(folder, "parallelize.py"))
        example = imported("example_train", Path(folder, "example_train.py"))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = plan.build_mesh("cpu")
        with torch.device("meta"):
            model = example.CausalModel(size or example.DIMENSIONS)
        plan.parallelize(model, mesh)
        blocks = list(model.model.layers)
        sharded = [block for block in blocks if isinstance(block, FSDPModule)]
        state = sharded[0]._get_fsdp_state()._fsdp_param_group
        return {
            "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
            "data_rank": plan.data_rank(mesh),
            "blocks": len(blocks),
            "sharded_blocks": len(sharded),
            "checkpointed": sum(isinstance(block, CheckpointWrapper) for block in blocks),
            "reshards": state._reshard_after_forward,
            "shard_ranks": state.mesh_info.shard_mesh_size,
            "compute": str(state.mp_policy.param_dtype),
            "reduce": str(state.mp_policy.reduce_dtype),
            "parameters": sum(local(parameter).numel() for parameter in model.parameters()),
            "tensors": len(list(model.parameters())),
        }
    finally:
        dist.destroy_process_group()


def main() -> None:
    """``[[name, files, sizes or null, world, rank], ...]``."""
    for name, files, size, world, rank in json.load(sys.stdin):
        try:
            answer = {"ok": True, **parallelized(files, size, world, rank)}
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({"name": name, **answer}), flush=True)


if __name__ == "__main__":
    main()
