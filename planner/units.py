"""Units and their formatting: the only place where GiB, GB, TFLOP/s and friends are converted.

Inside the product every quantity is in bytes, seconds, FLOP, bytes/s or FLOP/s; nothing here imports other planner
modules."""

from __future__ import annotations

MIB = 1024**2
GIB = 1024**3
GB = 1_000_000_000
TERA = 1_000_000_000_000
BITS_PER_BYTE = 8


def memory_unit(largest_bytes: float) -> tuple[str, int]:
    """Name and bytes of the unit in which sizes up to ``largest_bytes`` are read: GiB, or MiB for tiny ones."""
    return ("GiB", GIB) if abs(largest_bytes) >= GIB / 2 else ("MiB", MIB)


def gib(size_bytes: float) -> str:
    """Format bytes as GiB with the digits a reader can use (``71.3 GiB``); tiny sizes as MiB."""
    name, size = memory_unit(size_bytes) if size_bytes else ("GiB", GIB)
    return f"{size_bytes / size:.1f} {name}"


def duration(seconds: float) -> str:
    """Format a duration with three significant digits (``14.7 s``, ``320 ms``, ``45 us``, ``0 s``)."""
    if seconds >= 100 or seconds == 0:
        return f"{seconds:.0f} s"
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    if seconds >= 0.9995e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def count(value: float) -> str:
    """Format a parameter or token count (``70.6B``, ``4.2M``, ``512``)."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.0f}"


def counted(number: int, noun: str) -> str:
    """A number of things (``1 run``, ``1,803 runs``)."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def percent(ratio: float) -> str:
    """Format a ratio as a percentage with one decimal (``41.2 %``)."""
    return f"{100 * ratio:.1f} %"
