"""The what-if sliders: the values that each one steps through."""

from __future__ import annotations

from dataclasses import dataclass

from planner.catalog import default_system
from planner.errors import PlannerError
from planner_api.page.form import Form

LARGEST_NODES = 2048
SEQ_LENS = tuple(1 << k for k in range(9, 21))
BATCHES = tuple(1 << k for k in range(17))
MARGINS = tuple(range(0, 55, 5))


@dataclass(frozen=True)
class Slider:
    """Steps through values of one field of the form."""

    field: str
    label: str
    unit: str
    values: tuple[int, ...]
    at: int
    """Index of the value nearest to the form's."""


def sliders(form: Form) -> list[Slider]:
    """With the node size of the form's accelerator."""
    return [
        _slider(form, "gpus", "Number of GPUs", "GPUs", _gpu_counts(form), 8),
        _slider(form, "seq_len", "Sequence length", "tokens", SEQ_LENS, 8192),
        _slider(form, "global_batch", "Global batch", "sequences", BATCHES, 512),
        _slider(form, "memory_margin", "GPU memory kept free", "%", MARGINS, 0),
    ]


def _slider(form: Form, field: str, label: str, unit: str, values: tuple[int, ...], usual: int) -> Slider:
    text = form[field]
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else usual
    at = min(range(len(values)), key=lambda index: abs(values[index] - value))
    return Slider(field, label, unit, values, at)


def _gpu_counts(form: Form) -> tuple[int, ...]:
    """Parts of a node, then nodes in powers of two."""
    stated = form["gpus_per_node"]
    node = int(stated) if stated.isascii() and stated.isdigit() and 0 < int(stated[:6]) <= 1024 else 8
    if not stated and form["gpu"]:
        try:
            node = default_system(form["gpu"]).gpus_per_node
        except PlannerError:
            node = 8
    parts = [1 << k for k in range(node.bit_length()) if 1 << k < node]
    return (*parts, *(node << k for k in range(LARGEST_NODES.bit_length())))
