"""Tables of what the planner knows: models, accelerators and frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.padding import Padding
from rich.text import Text

from planner.cli.console import Justify, stdout, table
from planner.units import BITS_PER_BYTE, GB, GIB, TERA, count, counted

Row = Mapping[str, Any]


def print_models(rows: Sequence[Mapping[str, Any]]) -> None:
    """The model catalogue as a table."""
    cells = [
        [
            row["id"],
            count(row["params"]),
            count(row["active_params"]) if row["experts"] else "",
            str(row["layers"]),
            str(row["hidden"]),
            str(row["experts"] or ""),
            str(row["max_seq"]),
            ", ".join(row["aliases"][:3]),
        ]
        for row in rows
    ]
    headers: list[tuple[str, Justify]] = [
        ("model", "left"),
        ("params", "right"),
        ("active", "right"),
        ("layers", "right"),
        ("hidden", "right"),
        ("experts", "right"),
        ("max seq", "right"),
        ("aliases", "left"),
    ]
    stdout().print(table(headers, cells) if cells else NOTHING_FOUND)


NOTHING_FOUND = "Nothing has this text in its name; without it, everything is listed."


def print_gpus(rows: Sequence[Row]) -> None:
    """The accelerator catalogue as a table; rates are dense, links one direction."""
    cells = [
        [
            row["id"],
            row["architecture"],
            f"{row['memory_bytes'] / GIB:.1f}",
            f"{row['memory_bytes_per_s'] / GB:,.0f}",
            f"{row['peak_16bit_flops_per_s'] / TERA:,.0f}" if row["peak_16bit_flops_per_s"] else "",
            f"{row['peak_fp8_flops_per_s'] / TERA:,.0f}" if row["peak_fp8_flops_per_s"] else "",
            f"{row['fabric_bytes_per_s'] / GB:,.0f}",
            f"{row['nics_per_node']} x {row['nic_bytes_per_s'] * BITS_PER_BYTE / GB:g}",
            str(row["gpus_per_node"]),
            f"{row['usd_per_gpu_hour']:.2f}" if row["usd_per_gpu_hour"] is not None else "",
        ]
        for row in rows
    ]
    headers: list[tuple[str, Justify]] = [
        ("gpu", "left"),
        ("architecture", "left"),
        ("GiB", "right"),
        ("GB/s", "right"),
        ("16-bit", "right"),
        ("fp8", "right"),
        ("fabric", "right"),
        ("NICs", "right"),
        ("node", "right"),
        ("$/h", "right"),
    ]
    console = stdout()
    if not cells:
        console.print(NOTHING_FOUND)
        return
    console.print(table(headers, cells))
    console.print(
        Text(
            "16-bit and fp8: dense TFLOP/s; fabric: GB/s of a GPU, one direction; NICs: of the assumed node, Gbit/s; "
            "node: its GPUs; $/h: on-demand price of a GPU.",
            style="dim",
        )
    )


_FEATURES: tuple[tuple[str, str], ...] = (
    ("TP", "tp"),
    ("SP", "sequence_parallel"),
    ("CP", "cp"),
    ("PP", "pp"),
    ("VPP", "vpp"),
    ("uneven", "uneven_stages"),
    ("EP", "ep"),
    ("ETP", "etp"),
    ("HSDP", "hybrid_shard"),
    ("hpZ", "secondary_shard"),
)


def print_backends(rows: Sequence[Row], *, rules: bool) -> None:
    """A line for each framework with what it can express, and its rules."""
    console = stdout()
    if not rows:
        console.print(NOTHING_FOUND)
        return
    headers: list[tuple[str, Justify]] = [
        ("framework", "left"),
        *((title, "left") for title, _ in _FEATURES),
        ("ZeRO", "left"),
        ("recompute", "left"),
        ("offload", "left"),
    ]
    console.print(table(headers, [_expressed(row) for row in rows], tight=True))
    console.print(
        Text(
            "uneven: the layers of each pipeline stage can be chosen; HSDP: states sharded over part of the replicas; "
            "hpZ: a second, nearer shard of the weights; recompute: F full, S selective; "
            "offload: O optimizer, W weights too, disk NVMe.",
            style="dim",
        )
    )
    for row in rows:
        formats = ", ".join(row["expresses"]["precisions"])
        console.print(
            Text(f"{row['id']}: {row['title']}, {row['versions']}; {formats}; {counted(len(row['rules']), 'rule')}")
        )
    if not rules:
        console.print(Text("`planner backends --rules` lists the rules.", style="cyan"))
        return
    for row in rows:
        console.print(Text(f"\n{row['title']} {row['versions']}", style="bold"))
        for rule in row["rules"]:
            console.print(Text(f"  {rule['id']}"))
            console.print(Padding(Text(f"{rule['reason']} ({rule['source']})", style="dim"), (0, 0, 0, 4)))


def _expressed(row: Row) -> list[str]:
    features = row["expresses"]
    modes = [mark for mark, mode in (("F", "full"), ("S", "selective")) if mode in row["recompute"]]
    return [
        row["id"],
        *("y" if features[name] else "-" for _, name in _FEATURES),
        " ".join(map(str, row["zero_stages"])),
        " ".join(modes) or "-",
        _offload(row["offload"]),
    ]


def _offload(choices: Sequence[Row]) -> str:
    """``O W disk``: what can leave the GPU."""
    marks = {"O": bool(choices), "W": any(choice["parameters"] != "none" for choice in choices)}
    marks["disk"] = any("nvme" in (choice["optimizer"], choice["parameters"]) for choice in choices)
    return " ".join(mark for mark, there in marks.items() if there) or "-"
