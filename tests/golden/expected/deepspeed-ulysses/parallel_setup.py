"""llama3-8b on 16 GPUs with DeepSpeed: the parts of the plan that ds_config.json cannot hold.

    deepspeed.init_distributed()
    mpu = register_ulysses(name_or_path)    # before the model is loaded
    model = AutoModelForCausalLM.from_pretrained(name_or_path)
    engine = initialize(model, mpu)
    loader = split_batches(loader, engine.device)
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
SEQUENCE_RANKS = 8  # ranks that share one sequence
MICRO_BATCH = 1  # also train_micro_batch_size_per_gpu in ds_config.json
ATTENTION = "flash_attention_2"  # Hugging Face attention implementation


def config() -> dict[str, Any]:
    """The configuration that lies beside this module."""
    text = Path(__file__).with_name("ds_config.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def register_ulysses(model_name_or_path: str) -> Any:
    """Split every sequence over SEQUENCE_RANKS ranks; call it before the Hugging Face model is loaded.

    Returns the groups that ``initialize`` needs.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model_name_or_path,
        core_attn_implementation=ATTENTION,
        sequence_parallel_size=SEQUENCE_RANKS,
        micro_batch_size=MICRO_BATCH,
        seq_length=SEQ_LEN,
        seq_length_is_variable=False,
    )


def split_batches(loader: Any, device: Any) -> Any:
    """A loader whose batches (input_ids, position_ids, labels) hold this rank's part of each sequence."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups

    return UlyssesSPDataLoaderAdapter(
        loader,
        sp_rank=groups._get_sequence_parallel_rank(),
        sp_group=groups._get_sequence_parallel_group(),
        sp_world_size=groups._get_sequence_parallel_world_size(),
        device=device,
    )


def enable_recompute(model: nn.Module) -> nn.Module:
    """Recompute every block of a Hugging Face model when the plan says so."""
    if RECOMPUTE == "full":
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def initialize(model: nn.Module, mpu: Any) -> Any:
    """The DeepSpeed engine; mpu is what register_ulysses returned."""
    enable_recompute(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(), mpu=mpu)
    return engine
