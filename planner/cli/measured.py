"""Tables of the comparison with measured runs and of a calibration; the numbers are those of the documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from planner.cli.console import Justify, stdout, table
from planner.specs.accuracy import AccuracyDocument, Errors, FitRow, NotPriced, RecordProblem
from planner.specs.profile import Calibration
from planner.units import counted, duration, percent

MAX_LINES = 10
"""Problems, records or runs that are listed one by one; JSON has them all."""
MAX_TEXT = 100
"""Characters of a name or path from outside."""
_ERROR_HEADERS: list[tuple[str, Justify]] = [
    ("runs", "right"),
    ("half\nwithin", "right"),
    ("9 of 10\nwithin", "right"),
    ("mean", "right"),
]


def print_accuracy(document: AccuracyDocument, written: Sequence[Path]) -> None:
    """The whole comparison, top-down: time, memory, fit, ranking, what is not compared."""
    console = stdout()
    head = f"{_safe(document.records)}: {counted(document.read, 'run')} read, {document.priced:,} predicted"
    console.print(Text(head, style="bold"))
    if document.profile:
        whose = f"with the profile of {_safe(document.profile)}"
        there = f"  {document.profiled:,} of them {whose}"
        nowhere = f"  none of them {whose}: no run is on that accelerator"
        console.print(Text(there if document.profiled else nowhere))
    _time(console, document)
    _out_of_fold(console, document)
    _memory(console, document)
    _fit(console, document)
    _ranking(console, document)
    _reasons(console, "Step time measured, but not compared", document.excluded)
    _reasons(console, "Read, but not predicted", document.skipped)
    if document.records != PUBLIC:
        _records(console, document.not_priced)
    _problems(console, document.problems)
    _legend(console, document, written)


PUBLIC = "public records"


def _section(console: Console, title: str, headers: Sequence[tuple[str, Justify]], rows: Sequence[list[str]]) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(Padding(table(headers, rows, tight=False), (0, 0, 0, 2)))


def _errors(errors: Errors | None) -> list[str]:
    if errors is None:
        return ["0", "", "", ""]
    return [str(errors.rows), percent(errors.median), percent(errors.p90), _signed(errors.bias)]


def _signed(ratio: float) -> str:
    return f"{100 * ratio:+.1f} %"


def _time(console: Console, document: AccuracyDocument) -> None:
    rows = [
        [
            *(_safe(row.group), *_errors(row.errors), str(row.skipped or "")),
            *(percent(row.assumed) if row.errors else "", _share(row.in_range)),
        ]
        for row in document.step_time
    ]
    if not rows:
        console.print(Text("\nNo run states a step time that can be compared."))
        return
    headers = [(document.by, "left"), *_ERROR_HEADERS, ("not\npredicted", "right"), ("\nassumed", "right")]
    headers.append(("in\nrange", "right"))
    _section(console, "Step time, error of the prediction", headers, rows)


def _out_of_fold(console: Console, document: AccuracyDocument) -> None:
    """The same error by constants that were fitted without the run."""
    rows = [
        [_safe(row.group), *_within(row.validation.without_group), *_within(row.validation.without_source)]
        for row in document.step_time
        if row.validation is not None
    ]
    if rows:
        headers: list[tuple[str, Justify]] = [(document.by, "left")]
        for what in ("model", "source"):
            headers += [(f"without its {what}:\nhalf within", "right"), ("9 of 10\nwithin", "right")]
        _section(console, "The same by constants that were fitted without the run", headers, rows)


def _within(errors: Errors) -> list[str]:
    return [percent(errors.median), percent(errors.p90)]


def _memory(console: Console, document: AccuracyDocument) -> None:
    rows = [
        [_safe(row.group), "all figures" if row.kind == "any" else row.kind, *_errors(row.errors)]
        for row in document.memory_by_kind
    ]
    if rows:
        headers: list[tuple[str, Justify]] = [(document.by, "left"), ("figure", "left"), *_ERROR_HEADERS]
        _section(console, "Peak memory, error of the prediction", headers, rows)


def _fit(console: Console, document: AccuracyDocument) -> None:
    rows = [
        [_safe(row.group), str(_ran(row)), _share(row.false_misfits), str(_oom(row)), _share(row.false_fits)]
        for row in document.fit
    ]
    if rows:
        headers: list[tuple[str, Justify]] = [
            (document.by, "left"),
            ("ran", "right"),
            ("said not\nto fit", "right"),
            ("out of\nmemory", "right"),
            ("said\nto fit", "right"),
        ]
        _section(console, "Does it fit", headers, rows)


def _ran(row: FitRow) -> int:
    return row.ran_said_fits + row.ran_said_not


def _oom(row: FitRow) -> int:
    return row.oom_said_fits + row.oom_said_not


def _share(ratio: float | None) -> str:
    return "" if ratio is None else percent(ratio)


def _ranking(console: Console, document: AccuracyDocument) -> None:
    if not document.sweeps:
        return
    rows = [
        [
            _safe(sweep.source),
            _safe(sweep.model),
            str(sweep.gpus),
            str(sweep.rows),
            percent(sweep.regret),
            percent(sweep.top3_regret),
            f"{sweep.spearman:.2f}" + ("" if sweep.grid else " *"),
        ]
        for sweep in document.sweeps
    ]
    headers: list[tuple[str, Justify]] = [
        ("source", "left"),
        ("model", "left"),
        ("GPUs", "right"),
        ("runs", "right"),
        ("lost by\nfirst choice", "right"),
        ("by best\nof 3", "right"),
        ("rank\ncorr.", "right"),
    ]
    _section(console, "Ranking of the layouts of one model on one cluster", headers, rows)
    summary = document.ranking
    if summary is not None:
        console.print(
            Text(
                f"  {summary.sweeps} grids: the first choice loses {percent(summary.regret_mean)} on average "
                f"({percent(summary.regret_max)} at most), the best of three {percent(summary.top3_regret_mean)}; "
                f"median rank correlation {summary.spearman_median:.2f}"
            )
        )
    if not all(sweep.grid for sweep in document.sweeps):
        console.print(Text("  * the runs differ in more than their layout; not in the summary", style="dim"))


def _reasons(console: Console, title: str, reasons: Mapping[str, int]) -> None:
    if not reasons:
        return
    console.print()
    console.print(Text(title, style="bold"))
    for reason, rows in reasons.items():
        console.print(Text(f"  {rows:5d}  {reason}"), soft_wrap=True)


def _records(console: Console, rows: Sequence[NotPriced]) -> None:
    """The records themselves, where they are the user's."""
    lines = (f"{_safe(row.file)}:{row.line}: {_safe(row.id)}: {row.reason}" for row in rows)
    _limited(console, lines, len(rows))


def _problems(console: Console, problems: Sequence[RecordProblem]) -> None:
    if not problems:
        return
    console.print()
    console.print(Text(f"Not readable: {len(problems)}", style="bold yellow"))
    _limited(console, (_problem(problem) for problem in problems), len(problems))


def _problem(problem: RecordProblem) -> str:
    place = _safe(problem.file) + (f":{problem.line}" if problem.line is not None else "")
    parts = [f"{place}: {problem.what}"]
    parts += [f"      got: {problem.got}"] if problem.got else []
    parts += [f"      allowed: {problem.allowed}"] if problem.allowed else []
    parts += [f"      hint: {problem.hint}"] if problem.hint else []
    return "\n".join(parts)


def _limited(console: Console, lines: Iterable[str], total: int) -> None:
    for index, line in enumerate(lines):
        if index == MAX_LINES:
            console.print(Text(f"  ... and {total - MAX_LINES} more; --json lists all", style="dim"))
            return
        console.print(Text(f"  - {line}"), soft_wrap=True)


def _safe(text: str) -> str:
    """Text from outside without control characters, and short."""
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 3] + "..."


def _legend(console: Console, document: AccuracyDocument, written: Sequence[Path]) -> None:
    console.print()
    lines = [
        "Errors are predicted / measured - 1. Half within: the median; 9 of 10 within: the 90th percentile; mean: with "
        "its sign, - is too fast or too little memory. Assumed: share of runs whose source leaves a setting open. In "
        "range: share of runs whose step time is in the 80 % range of its estimate.",
    ]
    if any(row.validation for row in document.step_time):
        lines.append(
            "Without its model: without all runs of the run's source on its model and accelerator; without its source: "
            "without all runs of its source. This is what to expect of runs that nobody has measured yet."
        )
    for line in lines:
        console.print(Text(line, style="dim"))
    for path in written:
        console.print(Text(f"Written: {path}", style="cyan"), soft_wrap=True)
    if document.records == PUBLIC:
        console.print(
            Text("Next: `planner calibrate --from-records FILE` narrows the error on your own machines", style="cyan")
        )


def print_calibration(result: Calibration, out: Path | None) -> None:
    """What was fitted, what it does to every run, and what it would take to fit more."""
    console = stdout()
    profile = result.profile
    head = f"{profile.framework} on {profile.accelerator}: {counted(len(profile.runs), 'run')}"
    console.print(Text(head, style="bold"))
    _factors(console, result)
    _runs(console, result)
    line = (
        f"Median error of the step time: {percent(result.median_before)} before, {percent(result.median_after)} after"
    )
    if result.median_left_out is not None:
        line += f", {percent(result.median_left_out)} when each run is predicted from the others"
    console.print(Text(line, style="bold"), soft_wrap=True)
    for title, lines in (("Not fitted", result.not_fitted), ("Mind", result.warnings)):
        if lines:
            console.print(Text(f"\n{title}", style="bold"))
            _limited(console, lines, len(lines))
    if result.skipped:
        console.print(Text("\nRuns not used", style="bold"))
        _limited(console, (f"{_safe(name)}: {why}" for name, why in result.skipped.items()), len(result.skipped))
    _problems(console, result.problems)
    if out is not None:
        console.print(Text(f"\nWritten: {out}", style="cyan"), soft_wrap=True)
        console.print(Text(f"Next: `planner suggest ... --profile {out}`", style="cyan"), soft_wrap=True)
    else:
        console.print(Text("\nNext: add --out PROFILE.yaml to write the profile", style="cyan"))


def _factors(console: Console, result: Calibration) -> None:
    rows = [
        [
            factor.name,
            f"x {factor.factor:.3g}",
            f"{factor.low:g} to {factor.high:g}",
            percent(factor.determined),
            factor.meaning,
        ]
        for factor in result.profile.fitted
    ]
    headers: list[tuple[str, Justify]] = [
        ("", "left"),
        ("factor", "right"),
        ("plausible", "right"),
        ("from\nthe runs", "right"),
        ("of what", "left"),
    ]
    _section(console, "Factors on the published constants", headers, rows)


def _runs(console: Console, result: Calibration) -> None:
    runs = [run for run in result.profile.runs if run.measured_step_time_s is not None]
    rows = [
        [
            _safe(run.id),
            duration(run.measured_step_time_s or 0.0),
            *(
                "" if error is None else _signed(error)
                for error in (run.error_before, run.error_after, run.error_left_out)
            ),
        ]
        for run in runs[:MAX_LINES]
    ]
    headers: list[tuple[str, Justify]] = [
        ("run", "left"),
        ("measured", "right"),
        ("before", "right"),
        ("after", "right"),
        ("from the\nothers", "right"),
    ]
    _section(console, "Error of the predicted step time", headers, rows)
    if len(runs) > MAX_LINES:
        console.print(Text(f"  ... and {len(runs) - MAX_LINES} more; --json lists all", style="dim"))
