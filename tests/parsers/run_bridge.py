"""Megatron-Bridge's own recipe and validate() under rendered overrides, over many cases, on a CPU.

usage: run_bridge.py < cases.jsonl > results.jsonl

A case: {"id", "script", "overrides", "world", "environment": {...}, "capability": 9}; ``script`` is the rendered
pretrain_bridge.py, which builds the configuration here as it would on the cluster.  Stood in for: what Megatron-LM's
runner stands in for, and Transformer Engine, ModelOpt and Megatron-Energon."""

# The framework is not installed where types are checked.
# mypy: disable-error-code="import-not-found,import-untyped,unused-ignore"

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import run_megatron


def checked(case: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one case, or what refused it."""
    run_megatron.CAPABILITY = (case.get("capability", 9), 0)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(case["world"]), **case.get("environment", {})}
    stage = "overrides"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            script = types.ModuleType("pretrain_bridge")
            exec(compile(case["script"], "pretrain_bridge.py", "exec"), script.__dict__)
            with tempfile.TemporaryDirectory() as folder:
                overrides = Path(folder) / "overrides.txt"
                overrides.write_text(case["overrides"], encoding="utf-8")
                configuration = script.configuration([str(overrides)])
            from megatron.bridge.training.config import runtime_config_update

            stage = "validation"
            # What pretrain() does first: number formats are applied to all sections, then validate().
            runtime_config_update(configuration)
        model, train = configuration.model, configuration.train
        return {
            "id": case["id"],
            "accepted": True,
            "dp": configuration.data_parallel_size,
            "vpp": model.virtual_pipeline_model_parallel_size or 1,
            "micro_batches": train.global_batch_size // (train.micro_batch_size * configuration.data_parallel_size),
            "layers": model.num_layers,
            "sequence_parallel": model.sequence_parallel,
            "sharded": configuration.ddp.use_distributed_optimizer,
            "bf16": model.bf16,
        }
    except (Exception, SystemExit) as problem:
        frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if "/megatron/" in frame.filename]
        return {
            "id": case["id"],
            "accepted": False,
            "stage": stage,
            "message": " ".join(f"{type(problem).__name__}: {problem}".split())[:400],
            "where": f"{frames[-1].filename.split('/megatron/')[-1]}:{frames[-1].lineno}" if frames else "",
        }


def main() -> None:
    sys.meta_path.append(run_megatron.StandIn("transformer_engine", "modelopt", "megatron"))
    logging.disable(logging.WARNING)
    import torch

    stream = torch.cuda.Stream
    run_megatron.stand_in()
    # Its class stands in annotations here, and no model is built.
    torch.cuda.Stream = stream  # type: ignore[misc]
    for line in sys.stdin:
        sys.stdout.write(json.dumps(checked(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
