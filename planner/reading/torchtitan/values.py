"""Values of torchtitan's settings from what files and flags write, and what follows from them alone.

Every function takes plain values and gives None where they are of another kind."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from typing import Any

from planner.specs.model import MlaSpec, ModelSpec, MoeSpec

_LARGEST = 2**31


# --- Small parsers


def converted(value: Any, kind: str) -> Any:
    """``value`` as its field wants it; None when it is of another type."""
    if kind == "switch":
        words = {"true": True, "false": False}
        return value if isinstance(value, bool) else words.get(value.lower()) if isinstance(value, str) else None
    if kind == "word":
        return None if isinstance(value, bool) else value
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"[+-]?[0-9]{1,10}", value) else None
    return value if isinstance(value, int) else None


def in_range(value: Any, kind: str) -> bool:
    if kind == "count":
        return bool(1 <= value < _LARGEST) or value == 0
    return kind != "degree" or bool(-1 <= value < _LARGEST)


def words(value: Any) -> list[str]:
    """A list of words, given as a list or with commas or spaces between them."""
    if isinstance(value, list | tuple):
        return [str(word) for word in value]
    return [word for word in re.split(r"[,\s]+", str(value or "")) if word]


def module_lists(value: Any) -> list[list[Any]] | None:
    """The value of module_fqns_per_model_part, which a flag writes as Python or JSON."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return None
    if isinstance(value, list | tuple) and value and all(isinstance(part, list | tuple) for part in value):
        return [list(part) for part in value]
    return None


def split_at(points: list[str], layers: int) -> tuple[int, ...] | None:
    """Stages that begin at the modules named (0.1)."""
    starts = [int(found[1]) for point in points if (found := re.fullmatch(r"layers\.(\d{1,5})", point))]
    bounds = [0, *starts, layers]
    counts = tuple(after - before for before, after in pairwise(bounds))
    return counts if len(starts) == len(points) and min(counts) >= 0 else None


def planned_model(values: dict[str, Any]) -> ModelSpec:
    names = {"layers", "hidden", "ffn", "heads", "vocab", "tied", "max_seq", "mtp_layers"}
    fields: dict[str, Any] = {name: values[name] for name in names if name in values}
    if "kv_lora" in values:
        latent = {name: values[name] for name in ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v_head")}
        fields |= {
            "attention": "mla",
            "mla": MlaSpec(**latent),
            "kv_heads": values["heads"],
            "head_dim": values["qk_nope"] + values["qk_rope"],
        }
    else:
        fields |= {"kv_heads": values["kv_heads"], "head_dim": values["head_dim"]}
        fields["qk_norm"] = "per_head" if values["qk_norm"] else "none"
    if "experts" in values:
        mixture = ("experts", "top_k", "expert_ffn", "shared_ffn", "dense_first", "every", "offset", "expert_bias")
        fields["moe"] = MoeSpec(**{name: values[name] for name in mixture})
    return ModelSpec(name="plan_config", **fields)
