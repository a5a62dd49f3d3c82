"""``planner calibrate --on-this-machine``: its options, and the tables of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from planner.cli.console import Justify, stdout, table
from planner.errors import InputError
from planner.specs.profile import MachineCalibration, MachineMeasurement, ProfileRun
from planner.units import counted, duration, percent

if TYPE_CHECKING:
    from planner.service.requests import Progress

HERE = "--on-this-machine"
ONLY_HERE = ("gpu", "nproc", "model", "seq_len", "precision", "quick")
"""Parameters of calibrate that mean something beside --on-this-machine only."""


@dataclass(frozen=True)
class Given:
    """The options as they were given."""

    gpu: str | None
    nproc: int | None
    model: str | None
    seq_len: int | None
    precision: str | None
    quick: bool
    out: Path | None
    force: bool


def check_source(context: typer.Context, *, records: Sequence[Path] | None, here: bool) -> None:
    """Exactly one of the two sources, and only the options that belong to it."""
    if records and here:
        raise InputError(
            "a profile comes from runs or from this machine",
            where=HERE,
            got="--from-records beside it",
            allowed="one of the two",
            hint="make two profiles and see which predicts your runs better (`planner accuracy --records FILE "
            "--profile PROFILE.yaml`)",
        )
    if not records and not here:
        raise InputError(
            "nothing is given to calibrate with",
            where="planner calibrate",
            allowed="--from-records FILE, or --on-this-machine",
            hint="--from-records fits your own runs; --on-this-machine measures this computer",
        )
    if here:
        return
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in ONLY_HERE and source is not None and source.name == "COMMANDLINE":
            raise InputError(
                "this option belongs to --on-this-machine",
                where=parameter.opts[0],
                hint="the records say themselves what they ran on; leave it out",
            )


def measure(given: Given, progress: Progress | None) -> MachineCalibration:
    """Measure this machine and write the profile; what cannot be used is refused before anything is measured."""
    from planner.service.inputs import checked_int, one_of
    from planner.service.measured import write_profile
    from planner.service.models import resolve_model
    from planner.service.outputs import check_target
    from planner.specs.job import Precision
    from planner_validate.calibration.calibrating import Options, calibrate_this_machine

    if given.out is not None:
        check_target(given.out, "--out", force=given.force)
    precision = given.precision
    if precision is not None:
        precision = one_of(precision, "--precision", [name for name in get_args(Precision) if name not in NOT_MEASURED])
    options = Options(
        gpu=given.gpu,
        processes=given.nproc,
        model=None if given.model is None else resolve_model(given.model)[0],
        seq_len=None if given.seq_len is None else checked_int(given.seq_len, "--seq-len", 1, MOST_TOKENS),
        precision=next((name for name in get_args(Precision) if name == precision), None),
        quick=given.quick,
    )
    result = calibrate_this_machine(options, progress)
    if given.out is not None:
        write_profile(result.profile, given.out)
    return result


NOT_MEASURED = ("fp8", "nvfp4")
"""Formats that are measured beside 16 bits or not at all."""
MOST_TOKENS = 100_000_000


def print_machine(result: MachineCalibration, out: Path | None) -> None:
    """What was measured beside the published value, the factors, and what to do next."""
    console = stdout()
    profile = result.profile
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    processes = profile.processes or 1
    head = f"{result.device_name}: {counted(len(profile.measurements), 'measurement')} by {processes} "
    head += "process" if processes == 1 else "processes at once"
    console.print(Text(head, style="bold"), soft_wrap=True)
    console.print(Text(f"{profile.accelerator} on {result.host}, {profile.created}, {versions}"), soft_wrap=True)
    _measurements(console, profile.measurements)
    _factors(console, result)
    _runs(console, profile.runs)
    if result.residuals:
        console.print(Text("\nLeft over with the profile (median)", style="bold"))
        left = ", ".join(f"{kind} {percent(error)}" for kind, error in result.residuals.items())
        console.print(Text(f"  {left}"))
    lines = [f"{name}: {reason}" for name, reason in result.not_measured.items()]
    for title, found in (("Not measured", lines), ("Mind", result.warnings)):
        if found:
            console.print(Text(f"\n{title}", style="bold"))
            for line in found:
                console.print(Text(f"  - {line}"), soft_wrap=True)
    if out is not None:
        console.print(Text(f"\nWritten: {out}", style="cyan"), soft_wrap=True)
        console.print(Text(f"Next: `planner validate plan.json --profile {out}`", style="cyan"), soft_wrap=True)
    else:
        console.print(Text("\nNext: add --out PROFILE.yaml to write the profile", style="cyan"))


def _measurements(console: Console, rows: Sequence[MachineMeasurement]) -> None:
    headers: list[tuple[str, Justify]] = [
        ("measured", "left"),
        ("of", "left"),
        ("time", "right"),
        ("spread", "right"),
        ("published", "right"),
        ("profile", "right"),
    ]
    cells = [
        [
            row.kind,
            row.label,
            duration(row.seconds),
            percent(row.spread),
            _error(row.published_s, row.seconds),
            _error(row.fitted_s, row.seconds),
        ]
        for row in rows
    ]
    console.print()
    console.print(Text("Measured, and how far the cost model is from it", style="bold"))
    console.print(Padding(table(headers, cells), (0, 0, 0, 2)))


def _runs(console: Console, runs: Sequence[ProfileRun]) -> None:
    if not runs:
        return
    headers: list[tuple[str, Justify]] = [
        ("training run", "left"),
        ("step", "right"),
        ("published", "right"),
        ("profile", "right"),
    ]
    cells = [
        [
            run.id,
            duration(run.measured_step_time_s or 0.0),
            *("" if error is None else f"{100 * error:+.0f} %" for error in (run.error_before, run.error_after)),
        ]
        for run in runs
    ]
    console.print()
    console.print(Text("Short training runs, and how far the predicted step time is from them", style="bold"))
    console.print(Padding(table(headers, cells), (0, 0, 0, 2)))


def _error(predicted: float | None, measured: float) -> str:
    if predicted is None:
        return ""
    return f"{100 * (predicted / measured - 1):+.0f} %"


def _factors(console: Console, result: MachineCalibration) -> None:
    headers: list[tuple[str, Justify]] = [
        ("constant", "left"),
        ("factor", "right"),
        ("from the\nmeasurements", "right"),
        ("of what", "left"),
    ]
    cells = [
        [factor.name, f"x {factor.factor:.3g}", percent(factor.determined), factor.meaning]
        for factor in result.profile.fitted
    ]
    console.print()
    console.print(Text("Factors on the published constants", style="bold"))
    console.print(Padding(table(headers, cells), (0, 0, 0, 2)))
