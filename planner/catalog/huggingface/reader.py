"""Turns a config.json, a checkpoint folder or a vendor's params.json into a model specification with remarks.

Reads dimensions only, never weights.  What cannot be modelled faithfully is refused by name (see ``refusals``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.catalog.huggingface.build import build_spec
from planner.catalog.huggingface.dialects import deepseek_inference, meta_params, translate
from planner.catalog.huggingface.families import FAMILIES, family_name
from planner.catalog.huggingface.fields import Fields
from planner.catalog.huggingface.files import find_config, read_json, stored_params
from planner.catalog.huggingface.refusals import refuse_adapter, refuse_architecture, refuse_quantised
from planner.errors import InputError
from planner.specs.model import ModelSpec

_TOWERS = ("text_config", "llm_config", "language_config", "thinker_config")
_INHERITED = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config")
_NESTED_TYPE = {"gemma3": "gemma3_text", "llama4": "llama4_text", "llava": "llama", "llava_next": "llama"}
"""Type of a nested text model that does not name its own."""
_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp32": 4.0, "fp16": 2.0, "bf16": 2.0}


@dataclass(frozen=True)
class ModelReading:
    """What a configuration says."""

    spec: ModelSpec
    notes: tuple[str, ...]
    """Remarks that the user should see."""
    published_params: int | None
    """Parameters of the stored checkpoint, if an index beside the configuration tells."""


def read_model_config(path: Path) -> ModelReading:
    """Read a config.json, a folder that holds one, or the params.json of Meta or DeepSeek.

    Raises InputError, naming file and field, for whatever cannot be used.
    """
    file = find_config(path)
    fields = read_json(file)
    spec, notes, width = _read(fields, _name_of(fields, file))
    return ModelReading(spec, tuple(notes), stored_params(file, width))


def read_model_fields(content: dict[str, Any], where: str) -> ModelReading:
    """The same from the content of a config.json; ``where`` names it in errors."""
    fields = Fields(content, where)
    spec, notes, _ = _read(fields, _own_name(fields) or "model")
    return ModelReading(spec, tuple(notes), None)


def _read(fields: Fields, name: str) -> tuple[ModelSpec, list[str], float | None]:
    """Spec, what is worth saying, and bytes of a stored parameter where the file tells."""
    refuse_adapter(fields)
    if "weight_map" in fields:
        raise InputError("this is a weight index", where=fields.where, hint="give the config.json beside it")
    notes: list[str] = []
    stored_as = None if "dim" in fields else refuse_quantised(fields)
    if stored_as:
        notes.append(f"stored as {stored_as}: planned with bf16 weights, as it is trained")
    text = _text_model(_foreign(fields, notes), notes)
    family_id = _family_of(text)
    spec = build_spec(translate(text, family_id), family_id, FAMILIES[family_id], name, notes)
    dtype = text.text("torch_dtype", "dtype")
    width = None if stored_as else _BYTES.get((dtype or "").removeprefix("torch."))
    return spec, notes, width


def _foreign(fields: Fields, notes: list[str]) -> Fields:
    """Vendor inference files in the usual keys; others unchanged."""
    if "model_type" in fields or "architectures" in fields or "dim" not in fields:
        return fields
    if "moe_inter_dim" in fields or "kv_lora_rank" in fields:
        return deepseek_inference(fields, notes)
    if fields.nested("moe") is not None or fields.nested("moe_args") is not None:
        raise InputError(
            "a vendor params.json with experts is not supported",
            where=fields.where,
            hint="give the config.json of the Hugging Face release of this model",
        )
    return meta_params(fields, notes)


def _text_model(fields: Fields, notes: list[str]) -> Fields:
    """The text decoder inside a multimodal configuration, or the configuration itself."""
    for key in ("vision_config", "audio_config", "vit_config"):
        tower = fields.nested(key)
        if tower is not None:
            heads = tower.integer("num_attention_heads", "num_heads", minimum=1)
            detail = f" ({heads} heads: tensor parallelism must divide them if it is trained along)" if heads else ""
            notes.append(f"only the text model is planned: {key.removesuffix('_config')} tower ignored{detail}")
    name = next((name for name in _TOWERS if isinstance(fields.data.get(name), dict)), None)
    if name is None:
        return fields
    refuse_architecture(fields.with_defaults({"model_type": ""}), fields.text("model_type") or "")
    inner = fields.nested(name)
    if inner is None or (name == "thinker_config" and inner.first("text_config")):
        return _text_model(inner, notes) if inner else fields
    data = {key: fields.data[key] for key in _INHERITED if key in fields} | inner.data
    outer = fields.text("model_type") or ""
    if data.get("model_type") is None and not data.get("architectures"):
        data["model_type"] = _NESTED_TYPE.get(outer, outer)
    return Fields(data, inner.where)


def _family_of(fields: Fields) -> str:
    model_type = fields.text("model_type")
    architectures = fields.items("architectures") or []
    name = family_name(model_type, architectures)
    if name is None and not architectures:
        raise InputError(
            "this is not a model configuration: it names neither model_type nor architectures",
            where=fields.where,
            hint="give the config.json of a checkpoint",
        )
    refuse_architecture(fields, name or str(architectures[0]))
    if name not in FAMILIES:
        raise InputError(
            f"model type {name or architectures[0]!r} is not known",
            where=f"{fields.where}: model_type",
            got=name or str(architectures[0]),
            allowed=", ".join(sorted(FAMILIES)),
            hint="plan with the catalogue model of the same dimensions; `planner models` lists them",
        )
    return name


def _name_of(fields: Fields, file: Path) -> str:
    """A name for the plan: what the file calls itself, else its folder or stem."""
    generic = file.name in ("config.json", "params.json")
    return _own_name(fields) or _cleaned(file.resolve().parent.name if generic else file.stem) or "model"


def _own_name(fields: Fields) -> str:
    own = fields.data.get("_name_or_path")
    return _cleaned(own.rstrip("/").rsplit("/", 1)[-1]) if isinstance(own, str) else ""


def _cleaned(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:100]
