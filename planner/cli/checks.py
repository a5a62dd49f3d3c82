"""Prints what was found about an existing configuration: verdict first, then what to change, then where figures rest.

The numbers and sentences are those of the document."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.text import Text

from planner.cli.bars import memory_lines, time_lines
from planner.cli.console import stdout
from planner.cli.output import bullet, host_line, indented, notes, section
from planner.service.summary import assumption_lines
from planner.service.words import strategy_text
from planner.specs.check import CheckFinding, CheckReport, Improvement, instruction
from planner.units import TERA, counted, duration, gib, percent

STYLES = {"error": "red", "warning": "yellow", "note": ""}
MOST_UNREAD = 12
MOST_SETTINGS = 12


def print_check(report: CheckReport) -> None:
    """The whole check."""
    console = stdout()
    _head(console, report)
    _findings(console, report)
    _estimate(console, report)
    _improvements(console, report)
    _suggested(console, report)
    _rest(console, report)
    console.print(Text(f"\nNext: {_next(report)}", style="cyan"))


def print_diagnosis(report: CheckReport) -> None:
    """Measured against expected, then the causes in order."""
    console = stdout()
    _head(console, report)
    told = report.diagnosis
    if told is None:
        return
    low, high = told.expected_step_time_range_s
    section(console, "Measured against expected")
    step, tokens = duration(told.measured_step_time_s), told.measured_tokens_per_s
    reached, peak = told.model_flops_per_s_per_gpu / TERA, told.peak_flops_per_s_per_gpu / TERA
    indented(console, f"measured {step} a step ({tokens:,.0f} tokens/s of the job)")
    indented(
        console,
        f"which is MFU {percent(told.mfu)}: {reached:,.1f} of {peak:,.1f} TFLOP/s a GPU ({_precision(report)}, dense; "
        "model FLOPs with causal attention, without recomputation)",
    )
    indented(
        console,
        f"expected of this file {duration(told.expected_step_time_s)} a step ({duration(low)} to {duration(high)})",
    )
    verdict = "as expected of this file" if told.as_expected else f"{_times(told.slowdown)} the expected time"
    indented(console, verdict, "green" if told.as_expected else "yellow")
    if told.causes:
        section(console, "What to look at, in order")
        for index, cause in enumerate(told.causes, start=1):
            indented(console, f"{index}. {cause.message} [{cause.id}]")
            if cause.hint:
                indented(console, f"   {cause.hint}", "dim")
    _improvements(console, report)
    _rest(console, report)
    console.print(Text(f"\nNext: {_next_of_diagnosis(report)}", style="cyan"))


def _times(ratio: float) -> str:
    return f"{ratio:,.1f} times" if ratio >= 1 else f"{ratio:.2f} times"


def _next_of_diagnosis(report: CheckReport) -> str:
    if report.diagnosis is not None and report.diagnosis.causes:
        return "correct the first of these and measure again"
    if report.improvements:
        return "take one of the changes above; `planner check --suggest` searches for the best plan"
    return "nothing to correct: no single change makes this configuration faster"


def _precision(report: CheckReport) -> str:
    return "" if report.request is None else report.request.job.precision


def _head(console: Console, report: CheckReport) -> None:
    files = ", ".join(report.files)
    console.print(Text(f"{files}: {report.format}", style="bold"))
    verdicts = [("legal", "green") if report.legal else ("NOT LEGAL", "bold red")]
    verdicts.append(_fits(report))
    line = Text("  ")
    for index, (word, style) in enumerate(verdicts):
        line.append(", " if index else "").append(word, style=style)
    console.print(line)
    if report.plan is not None:
        indented(console, strategy_text(report.plan))


def _fits(report: CheckReport) -> tuple[str, str]:
    """Whether it fits, and its colour; what exceeds the limit only with the usual error of an estimate may fit."""
    if report.plan is None or report.fits is None:
        return "not priced", "yellow"
    if report.fits:
        return "fits", "green"
    estimate = report.plan.estimate
    on_the_gpu = estimate.peak_memory_bytes <= estimate.memory_limit_bytes < estimate.peak_memory_range_bytes[1]
    only_close = on_the_gpu and not any(finding.id in ("host-memory", "load-memory") for finding in report.findings)
    return ("MAY NOT FIT", "bold yellow") if only_close else ("DOES NOT FIT", "bold red")


def _findings(console: Console, report: CheckReport) -> None:
    if not report.findings:
        return
    section(console, counted(len(report.findings), "finding"))
    for _, alike in groupby(report.findings, key=lambda finding: (finding.severity, finding.id, finding.hint)):
        first, *others = alike
        _finding(console, first)
        places = list(dict.fromkeys(other.where for other in others if other.where and other.where != first.where))
        if places:
            indented(console, f"    also: {', '.join(places)}", "dim")


def _finding(console: Console, finding: CheckFinding) -> None:
    place = f"{finding.where}: " if finding.where else ""
    bullet(console, f"{finding.severity}: {place}{finding.message} [{finding.id}]", STYLES[finding.severity])
    for name, value in (("got", finding.got), ("allowed", finding.allowed), ("hint", finding.hint)):
        if value:
            indented(console, f"    {name}: {value}", "dim")


def _estimate(console: Console, report: CheckReport) -> None:
    if report.plan is None:
        return
    estimate = report.plan.estimate
    low, high = estimate.step_time_range_s
    section(console, f"Memory of a GPU (limit {gib(estimate.memory_limit_bytes)}), est.")
    for line in memory_lines(estimate, console.width):
        console.print(line)
    if report.request is not None:
        host_line(console, report.plan, report.request.cluster)
    section(
        console,
        f"Time of a step, est. {duration(estimate.step_time_s)} ({duration(low)} to {duration(high)}), "
        f"{estimate.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {percent(estimate.mfu)}",
    )
    for line in time_lines(report.plan, console.width):
        console.print(line)


def _improvements(console: Console, report: CheckReport) -> None:
    if not report.improvements:
        return
    section(console, _about_changes(report))
    for change in report.improvements:
        bullet(console, _told(change))
        _settings(console, change.settings)


def _about_changes(report: CheckReport) -> str:
    if report.plan is None:
        return "What makes the strategy legal and fits, each change by itself, the fastest first"
    if not report.plan.estimate.fits:
        return "What makes it fit, each change by itself, the fastest first"
    return "What helps most, each change by itself"


def _settings(console: Console, settings: tuple[str, ...]) -> None:
    """The change as the framework's files spell it."""
    if not settings:
        return
    more = len(settings) - MOST_SETTINGS
    rest = f"; and {more} more (--json lists them)" if more > 0 else ""
    indented(console, f"    {instruction(settings[:MOST_SETTINGS])}{rest}", "dim")


def _told(change: Improvement) -> str:
    estimate = change.plan.estimate
    told = f"{'; '.join(change.change)}: {duration(estimate.step_time_s)} a step"
    if change.step_time_change is not None:
        word = "faster" if change.step_time_change < 0 else "slower"
        told += f", {percent(abs(change.step_time_change))} {word}"
    return told + f", {gib(estimate.peak_memory_bytes)}"


def _suggested(console: Console, report: CheckReport) -> None:
    plan = report.suggested
    if plan is None:
        return
    section(console, f"Best plan of {plan.backend} for the same job")
    indented(console, strategy_text(plan))
    told = f"est. {duration(plan.estimate.step_time_s)} a step, {gib(plan.estimate.peak_memory_bytes)}"
    if report.plan is not None:
        gain = 1.0 - plan.estimate.step_time_s / report.plan.estimate.step_time_s
        told += f"; {percent(abs(gain))} {'faster' if gain >= 0 else 'slower'} than the configuration"
    indented(console, told)
    _settings(console, report.suggested_settings)


def _rest(console: Console, report: CheckReport) -> None:
    more = len(report.unread) - MOST_UNREAD
    unread = [*report.unread[:MOST_UNREAD], *([f"and {more} more (--json lists them)"] if more > 0 else [])]
    notes(console, "Not taken into account", unread)
    notes(console, "Warnings", report.warnings, style="yellow")
    notes(console, "Assumed", assumption_lines(report.assumptions))


def _next(report: CheckReport) -> str:
    if not report.legal:
        return "correct the errors above; the framework would refuse the file, or not do what it says"
    if report.fits is None:
        return "give what is missing above, then the file is priced too"
    if not report.fits:
        return _next_of_misfit(report)
    if report.suggested_settings:
        return f"write the settings of the best plan, or `planner suggest --backend {report.backend} --out FOLDER` does"
    if report.improvements and report.suggested is None:
        return "take one of the changes above; --suggest searches for the best plan"
    return "`planner render --from FILE --to FRAMEWORK` writes it for another framework"


def _next_of_misfit(report: CheckReport) -> str:
    if report.improvements:
        return "take one of the changes above, or --suggest for the best plan"
    if report.suggested is not None:
        return "no single change is enough: take the plan above, which changes several things at once"
    return "nothing fits on these machines: take one of the changes in the warnings above"
