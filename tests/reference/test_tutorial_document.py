"""The document docs/tutorial.md: its figures are those that the code computes, and every statement has a row and a
test.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.units import GB
from tests.reference.tutorial import (
    ROOT,
    SEVEN_B,
    activations_gb,
    all_reduce_ms,
    all_reduce_volume_gb,
    bubble_share,
    model_states_gb,
    paper_states,
    shard_volume,
    spec,
    states_per_param,
    tutorial_activations_gb,
)
from tests.strategies import machines

COMPUTED: dict[str, Callable[[], str]] = {
    "11 formula 7B GB": lambda: f"{tutorial_activations_gb(spec(SEVEN_B)):.2f}",
    "11 saved 7B GB": lambda: f"{activations_gb(SEVEN_B):.1f}",
    "10 saved 13B GB": lambda: f"{activations_gb('llama-2-13b'):.1f}",
    "10 saved 70B GB": lambda: f"{activations_gb('llama-2-70b'):.1f}",
    "9 states 7B GB": lambda: f"{model_states_gb(SEVEN_B, 'deepspeed'):.1f}",
    "9 states 13B GB": lambda: f"{model_states_gb('llama-2-13b', 'deepspeed'):.1f}",
    "9 states 70B GB": lambda: f"{model_states_gb('llama-2-70b', 'deepspeed'):.1f}",
    "9 megatron states 7B GB": lambda: f"{model_states_gb(SEVEN_B, 'megatron'):.1f}",
    "9 megatron states 70B GB": lambda: f"{model_states_gb('llama-2-70b', 'megatron'):.1f}",
    "18 volume 8 GPUs GB": lambda: f"{all_reduce_volume_gb(8, 14.0):.1f}",
    "20 in training ms": lambda: f"{all_reduce_ms(machines('h100', 8), 8, 14 * GB):.0f}",
    "21 one NIC ms": lambda: f"{all_reduce_ms(machines('h100', 512), 64, 14 * GB, stride=8):.0f}",
    "21 eight NICs ms": lambda: f"{all_reduce_ms(machines('h100', 16), 16, 14 * GB):.0f}",
    "29 bubble m 4 %": lambda: f"{100 * bubble_share(4, 4):.1f}",
    "29 bubble m 32 %": lambda: f"{100 * bubble_share(4, 32):.1f}",
    "40 ZeRO-1 N 4": lambda: f"{paper_states(1, 4):.1f}",
    "40 Megatron N 4": lambda: f"{states_per_param('megatron', 1, 4)['total']:.1f}",
    "41 ZeRO-2 N 4": lambda: f"{paper_states(2, 4):.1f}",
    "42 ZeRO-3 N 4": lambda: f"{states_per_param('fsdp', 3, 4)['total']:.1f}",
    "44 DDP traffic P": lambda: f"{shard_volume(0):.1f}",
    "45 ZeRO-1 traffic P": lambda: f"{shard_volume(1):.1f}",
    "46 ZeRO-2 traffic P": lambda: f"{shard_volume(2):.1f}",
    "46 ZeRO-2 traffic P m 8": lambda: f"{shard_volume(2, 8):.1f}",
    "47 ZeRO-3 traffic P": lambda: f"{shard_volume(3):.1f}",
    "47 ZeRO-3 traffic P m 8": lambda: f"{shard_volume(3, 8):.1f}",
    "54 fp32 states": lambda: f"{states_per_param('megatron', 0, precision='fp32')['total']:.0f}",
    "54 bf16 states": lambda: f"{states_per_param('deepspeed', 0)['total']:.0f}",
    "67 7B Megatron DDP GB": lambda: f"{model_states_gb(SEVEN_B, 'megatron'):.1f}",
}


def documented() -> dict[str, str]:
    """The ``name = value`` lines of the block that ends the document."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    block = text.split("```text\n", 1)[1].split("```", 1)[0]
    return dict(line.split(" = ") for line in block.strip().splitlines())


@pytest.mark.parametrize("name", COMPUTED)
def test_document_prints_what_the_code_gives(name: str) -> None:
    """Each figure of the block at the end of docs/tutorial.md equals the computed one."""
    assert documented()[name] == COMPUTED[name]()


@pytest.mark.parametrize("name", COMPUTED)
def test_table_row_states_the_figure(name: str) -> None:
    """The row of the item shows the figure of the block, too (7.0 may be written 7)."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| {name.split()[0]} |"))
    precise = row.split("|")[4].replace(",", "")
    value = float(documented()[name])
    assert re.search(rf"(?<![\d.]){re.escape(f'{value:.10g}')}(?![\d]|\.\d)(?:\.0)?", precise), row


def test_document_lists_every_item_once() -> None:
    """Each of the 73 statements has a row, each figure of the block a test, and each item a test of its own."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE)]
    assert sorted(rows) == list(range(1, 74))
    assert set(documented()) == set(COMPUTED)
    sources = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_tutorial_*.py")]
    tested = {int(item) for source in sources for item in re.findall(r"^def test_item_(\d\d)_", source, re.MULTILINE)}
    assert tested == set(range(1, 74))
