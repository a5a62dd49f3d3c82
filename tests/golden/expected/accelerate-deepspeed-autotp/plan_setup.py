"""llama3-8b on 16 GPUs with accelerate: the parts of the plan that no configuration file holds.

    arguments = training_arguments(output_dir="...")    # before the model is loaded
    model = load_model(name_or_path)
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collate)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainingArguments

# The plan.
SEQ_LEN = 8192  # tokens of one packed sequence
ATTENTION = "sdpa"  # Hugging Face attention implementation
WEIGHTS = "auto"  # number format the weights load in


def training_arguments(**changes: Any) -> TrainingArguments:
    """The arguments that lie beside this module, with ``changes`` (output folder, learning rate, number of steps)."""
    text = Path(__file__).with_name("training_arguments.json").read_text(encoding="utf-8")
    return TrainingArguments(**{**json.loads(text), **changes})


def load_model(name_or_path: str, **options: Any) -> Any:
    """A finished model with the attention that the plan counts on; accelerate shards it when training starts."""
    return AutoModelForCausalLM.from_pretrained(
        name_or_path, dtype=WEIGHTS, attn_implementation=ATTENTION, use_cache=False, **options
    )


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A micro-batch of packed sequences: every sample has SEQ_LEN tokens in ``input_ids``, so nothing is padded."""
    rows = [list(sample["input_ids"]) for sample in samples]
    lengths = sorted({len(row) for row in rows})
    if lengths != [SEQ_LEN]:
        raise ValueError(f"samples of {lengths} tokens, but the plan is for packed sequences of {SEQ_LEN}")
    tokens = torch.tensor(rows)
    return {"input_ids": tokens, "labels": tokens.clone()}
