"""llama3-8b on 16 GPUs with DeepSpeed: the parts of the plan that ds_config.json cannot hold.

    deepspeed.init_distributed()
    model = pipeline(layers, loss_function, DecoderLayer)    # LayerSpec of every module, embedding to head
    engine = initialize(model)
    loss = engine.train_batch(iterator)                      # all micro-batches of a step
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
from torch import nn

# The plan.
RECOMPUTE = "full"  # none or full
SEQ_LEN = 8192  # tokens of a sequence, whole and without padding
PIPELINE_STAGES = 4
DATA_PARALLEL = 4


def config() -> dict[str, Any]:
    """The configuration that lies beside this module."""
    text = Path(__file__).with_name("ds_config.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def pipeline(layers: list[Any], loss_function: Any, block_class: type[nn.Module]) -> nn.Module:
    """The model as a pipeline: ``layers`` is the flat list of LayerSpec from embedding to head.

    Blocks of ``block_class`` are dealt evenly to the stages; embedding and head go with the first and the last of them.
    """
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    return PipelineModule(
        layers=layers,
        topology=PipeDataParallelTopology(num_pp=PIPELINE_STAGES, num_dp=DATA_PARALLEL),
        loss_fn=loss_function,
        partition_method=f"type:{block_class.__name__}",
        activation_checkpoint_interval=1 if RECOMPUTE == "full" else 0,
    )


def initialize(model: nn.Module) -> Any:
    """The DeepSpeed engine."""
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())
    return engine
