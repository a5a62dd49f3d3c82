"""llama3-70b on 8 GPUs with DeepSpeed: the parts of the plan that ds_config.json cannot hold.

    deepspeed.init_distributed()
    model = AutoModelForCausalLM.from_pretrained(name_or_path)
    engine = initialize(model)
    for batch in loader:
        loss = engine(**batch).loss; engine.backward(loss); engine.step()
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


def config() -> dict[str, Any]:
    """The configuration that lies beside this module."""
    text = Path(__file__).with_name("ds_config.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def enable_recompute(model: nn.Module) -> nn.Module:
    """Recompute every block of a Hugging Face model when the plan says so."""
    if RECOMPUTE == "full":
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def initialize(model: nn.Module) -> Any:
    """The DeepSpeed engine."""
    enable_recompute(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())
    return engine
