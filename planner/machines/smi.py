"""Reads what ``nvidia-smi`` prints about GPUs, in each of its forms: which there are, how large, how busy, how healthy.

Memory is the printed number: names lie about it (``80GB`` has 79.6 GiB, an H100 NVL 93.6, rebuilt cards anything)."""

from __future__ import annotations

import re
from collections import Counter

from planner.errors import InputError
from planner.machines import smi_query, smi_report
from planner.machines.devices import in_use
from planner.machines.inventory import Device, Inventory
from planner.machines.text import clean, listed, note, span, warning
from planner.specs.finding import Finding
from planner.specs.problems import shown

FULL_WIDTH = 16
"""PCIe lanes of every data-center card and slot, where the text does not give the card's own."""

_FORMS = (
    (smi_query.TITLE, smi_query.recognises, smi_query.read),
    (smi_report.LIST_TITLE, smi_report.is_list, smi_report.read_list),
    (smi_report.TABLE_TITLE, smi_report.is_table, smi_report.read_table),
    (smi_report.LOG_TITLE, smi_report.is_log, smi_report.read_log),
    (smi_query.TITLE, smi_query.recognises_rows, smi_query.read_rows),
)
"""Every form, those with certain marks first."""
_LOST = re.compile(r"Unable to determine the device handle for (?:GPU|gpu)[^\n]*")


def recognises(text: str) -> bool:
    """Whether one of the forms is there."""
    plain = clean(text)
    return any(recognised(plain) for _, recognised, _ in _FORMS)


def read(text: str, where: str = smi_query.TITLE) -> Inventory:
    """GPUs of one machine (and how many machines, where several were asked at once)."""
    plain = clean(text)
    title, reader = next(
        ((title, reader) for title, recognised, reader in _FORMS if recognised(plain)), (smi_query.TITLE, None)
    )
    if reader is None:
        first = next((line for line in plain.splitlines() if line.strip()), "")
        raise InputError(
            "no list of GPUs is found",
            where=where,
            got=shown(first) if first else "nothing",
            allowed="nvidia-smi, nvidia-smi -q, nvidia-smi -L, or nvidia-smi --query-gpu=... --format=csv",
            hint=smi_query.HINT,
        )
    machines, told = reader(plain, where)
    devices = machines[0]
    findings = [*told, *_unreachable(plain), *_about(devices), *_about_machines(machines)]
    unnamed = [device.index for device in devices if device.memory_mib is None and not device.failed]
    return Inventory(
        source=title,
        devices=tuple(devices),
        machines=len(machines) if len(machines) > 1 else None,
        findings=tuple(findings),
        unread=(f"memory of GPU {span(unnamed)}",) if unnamed else (),
    )


def _unreachable(text: str) -> list[Finding]:
    """GPUs that the driver knows and leaves out of the list."""
    return [
        warning(
            "gpu-failed",
            f"{match[0][:150]}: this GPU is not in the list and not counted",
            hint="look for Xid in dmesg; a reset or a cold start may bring it back",
        )
        for match in _LOST.finditer(text)
    ]


def _about_machines(machines: list[list[Device]]) -> list[Finding]:
    if all(_kinds(other) == _kinds(machines[0]) for other in machines[1:]):
        return []
    return [warning("machines-differ", f"the {len(machines)} machines differ in their GPUs; the first is read")]


def _kinds(devices: list[Device]) -> Counter[tuple[str | None, int | None]]:
    return Counter((device.name, device.memory_mib) for device in devices)


def _about(devices: list[Device]) -> list[Finding]:
    findings = []
    for device in devices:
        findings += in_use([device], "CUDA_VISIBLE_DEVICES")
        full = device.full_link_width or FULL_WIDTH
        if device.link_width is not None and device.link_width < full:
            findings.append(
                warning(
                    "pcie-narrow",
                    f"GPU {device.index} uses PCIe x{device.link_width} of x{full}: offload and PCIe collectives are "
                    "slower than planned",
                    where=f"GPU {device.index}",
                    hint="check slot and riser; the width is that of the moment, ask again under load",
                )
            )
    return [*findings, *_about_parts(devices), *_about_kinds([device for device in devices if not device.failed])]


def _about_parts(devices: list[Device]) -> list[Finding]:
    """GPUs that do not count."""
    findings = []
    split = [device.index for device in devices if device.mig]
    if split:
        findings.append(
            warning(
                "mig-enabled",
                f"MIG is enabled on GPU {span(split)}: instances cannot train together, so it is not counted",
                where=f"GPU {span(split)}",
                hint=f"to use it whole: nvidia-smi -i {split[0]} -mig 0",
            )
        )
    failed = [device.index for device in devices if device.failed]
    if failed:
        findings.append(
            warning(
                "gpu-failed",
                f"GPU {span(failed)} does not answer the driver and is not counted",
                where=f"GPU {span(failed)}",
                hint=f"look for Xid in dmesg; nvidia-smi --gpu-reset -i {failed[0]} or a cold start may bring it back",
            )
        )
    return findings


def _about_kinds(devices: list[Device]) -> list[Finding]:
    names = Counter(device.name or "unnamed" for device in devices)
    sizes = sorted({device.memory_mib for device in devices if device.memory_mib is not None})
    if len(names) > 1:
        kinds = listed([f"{times} x {name}" for name, times in names.items()], 10)
        smallest = f"; the smallest has {sizes[0]} MiB" if sizes else ""
        return [
            warning(
                "gpus-mixed",
                f"mixed models: {kinds}{smallest}. A plan gives every GPU the same work, so the smallest and "
                "the slowest bind all",
                hint="list the GPUs of the job only: nvidia-smi -i 0,1 --query-gpu=...",
            )
        ]
    if len(sizes) > 1 and sizes[-1] > 1.02 * sizes[0]:
        return [warning("memory-mixed", f"GPUs have {sizes[0]} to {sizes[-1]} MiB; the smallest binds all")]
    if sizes and len(devices) > 1 and any(device.memory_mib is None for device in devices):
        return [note("memory-partly-unknown", "some GPUs do not say how much memory they have")]
    return []
