"""Tables of what the planner knows: models, accelerators and frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.padding import Padding
from rich.text import Text

from planner.cli.console import Justify, stdout, table
from planner.units import BITS_PER_BYTE, GB, GIB, TERA, count

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


def print_backends(rows: Sequence[Row], *, rules: bool) -> None:
    """What each framework expresses, one column each, and its rules."""
    console = stdout()
    facts: list[tuple[str, Any]] = [
        ("versions", lambda row: row["versions"]),
        ("ZeRO stages", lambda row: ", ".join(map(str, row["zero_stages"]))),
        ("sequence parallel with tp", lambda row: ", ".join("yes" if v else "no" for v in row["sequence_parallel"])),
        ("pipeline schedules", lambda row: ", ".join(row["pipeline_schedules"]) or "no pipeline"),
        ("expert parallelism", lambda row: "yes" if row["expert_parallel"] else "no"),
        ("context parallel traffic", lambda row: row["context_parallel"]),
        ("offload", lambda row: _offload(row["offload"])),
        ("rules", lambda row: str(len(row["rules"]))),
    ]
    headers: list[tuple[str, Justify]] = [("", "left"), *((row["id"], "left") for row in rows)]
    console.print(table(headers, [[name, *(fact(row) for row in rows)] for name, fact in facts]))
    if not rules:
        console.print(Text("`planner backends --rules` lists the rules.", style="cyan"))
        return
    for row in rows:
        console.print(Text(f"\n{row['title']} {row['versions']}", style="bold"))
        for rule in row["rules"]:
            console.print(Text(f"  {rule['id']}"))
            console.print(Padding(Text(f"{rule['reason']} ({rule['source']})", style="dim"), (0, 0, 0, 4)))


def _offload(choices: Sequence[Row]) -> str:
    devices = dict.fromkeys(
        f"optimizer to {c['optimizer']}" + (f", weights to {c['parameters']}" if c["parameters"] != "none" else "")
        for c in choices
    )
    return "; ".join(devices) or "none"
