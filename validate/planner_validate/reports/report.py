"""A validation report as files: JSON for programs, Markdown for people, and a picture of predicted beside measured."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.accuracy.comparison.plot import check_available
from planner.errors import InputError, MissingExtraError
from planner.render.files import write_files
from planner.service.words import strategy_text
from planner.specs.plan import Plan
from planner.specs.problems import shown
from planner.specs.validation import Comparison, RankFailure, ValidationReport
from planner.units import duration, memory_unit, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEM = "report"
SUFFIXES = (".json", ".md", ".svg")
NO_PICTURE = "no picture: {}; pip install 'parallel-planner[plot]'"
DETAIL_LINES = 20
_STYLE: dict[Any, Any] = {"svg.hashsalt": "planner", "svg.fonttype": "none", "font.size": 9.0}


def places(out: str) -> tuple[Path, str]:
    """Folder and stem of the files: inside a folder that exists or is named with a slash at its end, else beside each
    other under a prefix."""
    path = Path(out)
    if path.is_dir() or out.endswith(os.sep):
        return path, STEM
    return path.parent, path.stem if path.suffix in SUFFIXES else path.name


def check_out(out: str, *, force: bool, plan: Path | None = None) -> None:
    """Refuse a place that cannot be written before anything is run for it; ``plan`` is never replaced."""
    if not out.strip():
        raise _unusable(out, "no place is named")
    try:
        folder, stem = places(out)
        taken = [folder / f"{stem}{suffix}" for suffix in SUFFIXES if (folder / f"{stem}{suffix}").exists()]
        home = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), Path("/"))
        # Whether a file can really be made there no permission bits tell.
        with tempfile.TemporaryFile(dir=home):
            pass
    except (OSError, ValueError) as problem:
        raise _unusable(out, getattr(problem, "strerror", None) or str(problem)) from problem
    if plan is not None and any(os.path.realpath(path) == os.path.realpath(plan) for path in taken):
        raise InputError(
            "the report would replace the plan itself",
            where="--out",
            got=shown(out),
            allowed="a folder, or a prefix other than the plan's name",
            hint="name another, for example --out report",
        )
    if taken and not force:
        raise InputError(
            f"these files exist already: {', '.join(path.name for path in taken)}",
            where="--out",
            got=shown(str(folder)),
            hint="pass --force to overwrite them, or name another",
        )


def _unusable(out: str, why: str) -> InputError:
    return InputError(
        f"the report cannot be written there: {why}",
        where="--out",
        got=shown(out),
        allowed="a folder, or a folder and a prefix",
        hint="choose a place that you may write to",
    )


def write(report: ValidationReport, out: str, *, force: bool) -> tuple[list[Path], str]:
    """Write all files or none; their paths, and why there is no picture (empty: there is one)."""
    folder, stem = places(out)
    files = {
        f"{stem}.json": json.dumps(as_json(report), indent=2, allow_nan=False) + "\n",
        f"{stem}.md": markdown(report, picture=f"{stem}.svg"),
    }
    missing = ""
    try:
        files[f"{stem}.svg"] = picture(report).decode()
    except MissingExtraError as problem:
        missing = NO_PICTURE.format(problem.got or problem.message)
        files[f"{stem}.md"] = markdown(report, picture=None)
    return write_files(folder, files, force=force), missing


def as_json(report: ValidationReport) -> dict[str, Any]:
    """The document as plain JSON types, with the errors that are worked out from it."""
    document: dict[str, Any] = report.model_dump(mode="json")
    for name in ("step_time", "peak_memory"):
        found: Comparison | None = getattr(report, name)
        if found is not None:
            document[name] |= {"error": found.error, "within": found.within}
    for name in ("time_terms", "memory_terms"):
        for row, term in zip(document[name], getattr(report, name), strict=True):
            row["error"] = term.error
    return document


def headline(report: ValidationReport) -> str:
    """The verdict in one line."""
    if report.verdict == "failed":
        if not report.failures:
            return "FAILED: " + (report.suspects[0] if report.suspects else "nothing was measured")
        return f"FAILED: {failure_line(report.failures[0])}"
    parts = [sentence(each) for each in (report.step_time, report.peak_memory) if each is not None]
    word = "WITHIN the stated ranges" if report.verdict == "within" else "OUTSIDE the stated ranges"
    return f"{word}: {'; '.join(parts)}"


def sentence(found: Comparison) -> str:
    """``step time 1.05 x predicted (in range)``."""
    if found.measured is None:
        return f"{found.name} was not measured"
    return f"{short(found.name)} {found.measured / found.predicted:.2f} x predicted ({_place(found)})"


def _place(found: Comparison) -> str:
    if found.within:
        return "in range"
    above = found.high is not None and found.measured is not None and found.measured > found.high
    return "above the range" if above else "below the range"


def short(name: str) -> str:
    """A figure's name without what it is of."""
    return name.split(",")[0]


def failure_line(failure: RankFailure) -> str:
    """``rank 1, out-of-memory in step 2: ...``."""
    who = "the run" if failure.rank is None else f"rank {failure.rank}"
    return f"{who}, {failure.kind} in {failure.phase}: {failure.message}"


def memory_text(size: float) -> str:
    """Bytes in the unit that a reader can use; tiny models have no GiB."""
    unit, one = memory_unit(size)
    return f"{size / one:.2f} {unit}"


def row_texts(found: Comparison, *, memory: bool) -> tuple[str, str, str, str, str]:
    """Predicted, measured, error, spread and range of a comparison as texts; empty where there is none."""
    text = memory_text if memory else duration
    measured = "" if found.measured is None else text(found.measured)
    error = "" if found.error is None or not found.predicted else f"{100 * found.error:+.1f} %"
    spread = "" if found.spread is None else percent(found.spread)
    stated = "" if found.low is None or found.high is None else f"{text(found.low)} to {text(found.high)}"
    return text(found.predicted), measured, error, spread, stated


def rows(report: ValidationReport) -> list[tuple[str, Comparison, bool]]:
    """All comparisons with their names; whether it is memory."""
    found: list[tuple[str, Comparison, bool]] = []
    found += [("step time", report.step_time, False)] if report.step_time is not None else []
    found += [(term.name, term, False) for term in report.time_terms]
    found += [(report.peak_memory.name, report.peak_memory, True)] if report.peak_memory is not None else []
    return found + [(term.name, term, True) for term in report.memory_terms]


def gradient_line(report: ValidationReport) -> str | None:
    """What the check of the gradients found."""
    check = report.gradients
    if check is None:
        return None
    word = "equal" if check.passed else "NOT equal"
    return (
        f"{word} to the unsharded model: largest relative error {check.largest_relative_error:.2g} of "
        f"{check.parameters:,} parameters (allowed {check.tolerance:g}), norm {check.gradient_norm:.5g} against "
        f"{check.reference_norm:.5g}"
    )


def loss_line(report: ValidationReport) -> str | None:
    """First and last loss."""
    if not report.losses:
        return None
    return f"{report.losses[0]:.4g} to {report.losses[-1]:.4g} over {len(report.losses)} steps"


def next_step(report: ValidationReport) -> str:
    """What to do with the result."""
    if report.verdict == "failed":
        kinds = {failure.kind for failure in report.failures}
        if "interrupted" in kinds:
            return "run it again without interrupting it; --steps 8 is the shortest"
        if "out-of-memory" in kinds:
            return "`planner suggest --memory-margin 0.1 ...` keeps more memory free; --memory-only tells where it goes"
        if "timeout" in kinds:
            return "look at the named rank; --timeout gives slow machines more time"
        if not report.failures:
            return "look at the first suspect: this training is wrong, whatever its speed"
        return "look at the first failure; --json has the last lines of every rank"
    if report.mode == "memory-only":
        return _after_memory(report)
    if report.verdict == "outside" and report.step_time is not None and report.step_time.within:
        return "look at the first suspect; a profile of `planner calibrate` would change the predicted times only"
    if report.verdict == "outside" and report.request.profile is None:
        return f"`{_calibrate(report)}`, then again with --profile machine.yaml"
    if report.verdict == "outside" and report.mode == "proxy":
        return "look at the first suspect; a run of the whole plan tells traffic and waiting, too"
    if report.mode == "proxy":
        return "the rank's own work can be trusted this far; run the whole plan where it has its devices"
    if report.verdict == "outside":
        return "look at the first suspect; --record FILE.jsonl keeps the run for `planner calibrate --from-records`"
    return "the plan can be trusted this far; --record FILE.jsonl adds the run to your own records"


def _after_memory(report: ValidationReport) -> str:
    """Nothing was timed and no record can be made of it."""
    if report.verdict == "outside":
        return (
            "look at the first suspect; sizes are exact here, so keep the measured peak in mind when choosing the plan"
        )
    return "the memory can be trusted this far; its times need a run: --proxy on one device, or the whole plan"


def _calibrate(report: ValidationReport) -> str:
    """The command that measures what the plan ran on; on a machine with GPUs the processor has to be named."""
    cluster = report.request.cluster
    there = f" --gpu cpu --nproc {cluster.gpus}" if cluster.accelerator.synchronous else ""
    return f"planner calibrate --on-this-machine{there} --out machine.yaml"


def markdown(report: ValidationReport, *, picture: str | None) -> str:
    """The report for people."""
    request, strategy = report.request, report.strategy
    lines = [
        f"# {request.model.name} on {request.cluster.gpus} x {request.cluster.accelerator.id}: {report.verdict}",
        "",
        headline(report),
        "",
        f"- mode: {report.mode}, planned for: {report.planned_for}, plan `{report.plan_id[:12]}`",
        f"- what ran: {strategy_words(report)}",
        f"- where: {report.environment.devices} x {report.environment.device}"
        + (f" on {', '.join(report.environment.hosts)}" if report.environment.hosts else "")
        + f"; {versions(report)}",
        f"- when: {report.created}, planner {report.planner_version}",
        f"- job: {strategy.global_batch} sequences of {strategy.seq_len} tokens a step, {strategy.precision}",
        "",
    ]
    lines += _list("Differs from the plan", report.changed)
    lines += _table(report)
    for title, line in (("Gradients", gradient_line(report)), ("Loss", loss_line(report))):
        lines += [f"## {title}", "", line, ""] if line else []
    lines += _collectives(report)
    lines += _list("First suspects", report.suspects)
    lines += _failures(report.failures)
    lines += _list("Notes", (*report.notes, f"ranges: {report.estimate.range_basis}"))
    if picture is not None:
        lines += [f"![predicted and measured]({picture})", ""]
    lines += [f"Next: {next_step(report)}"]
    return "\n".join(lines) + "\n"


def strategy_words(report: ValidationReport) -> str:
    """The strategy in one line."""
    return strategy_text(Plan(backend=report.request.backend, strategy=report.strategy, estimate=report.estimate))


def versions(report: ValidationReport) -> str:
    """Versions in one line."""
    named = report.environment.versions
    return ", ".join(f"{name} {version}" for name, version in named.items()) or "versions not told"


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {line}" for line in lines), ""] if lines else []


def _table(report: ValidationReport) -> list[str]:
    found = rows(report)
    if not found:
        return []
    lines = ["## Predicted and measured", "", "| | predicted | measured | error | spread | stated range | |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | --- | --- |")
    for name, each, memory in found:
        origin = "" if each.origin == "measured" else each.origin
        lines.append(f"| {name} | {' | '.join(row_texts(each, memory=memory))} | {origin} |")
    return [*lines, ""]


def _collectives(report: ValidationReport) -> list[str]:
    if not report.collectives:
        return []
    lines = ["## Collectives of one step", "", "| operation | group | calls | bytes | time |"]
    lines.append("| --- | --- | ---: | ---: | ---: |")
    for use in report.collectives:
        seconds = "" if use.seconds is None else duration(use.seconds)
        lines.append(f"| {use.operation} | {use.group} | {use.calls:,} | {memory_text(use.sent_bytes)} | {seconds} |")
    return [*lines, ""]


def _failures(failures: Sequence[RankFailure]) -> list[str]:
    if not failures:
        return []
    lines = ["## Failures, the first cause first", ""]
    for failure in failures:
        lines.append(f"- {failure_line(failure)}")
        if failure.details.strip():
            kept = failure.details.strip().splitlines()[-DETAIL_LINES:]
            lines += ["", "  ```", *(f"  {line}" for line in kept), "  ```", ""]
    return [*lines, ""]


def picture(report: ValidationReport) -> bytes:
    """Bars of predicted and measured by term, time on the left and memory on the right, as SVG; MissingExtraError
    without matplotlib."""
    check_available()
    import matplotlib
    from matplotlib.figure import Figure

    found = rows(report)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11.0, 1.2 + 0.55 * max(4, len(found) // 2 + 2)), layout="constrained")
        figure.suptitle(headline(report)[:120])
        for index, memory in enumerate((False, True)):
            axes = figure.add_subplot(1, 2, index + 1)
            _bars(axes, [(name, each) for name, each, is_memory in found if is_memory == memory], memory=memory)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _bars(axes: Axes, found: Sequence[tuple[str, Comparison]], *, memory: bool) -> None:
    axes.set_title("memory of the fullest rank" if memory else "time of a step")
    if not found:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    largest = max(max(each.predicted, each.measured or 0.0) for _, each in found)
    scale, unit = _unit(largest, memory=memory)
    for place, (_, each) in enumerate(found):
        axes.barh(place - 0.2, each.predicted / scale, height=0.36, color="0.65", label=None if place else "predicted")
        if each.measured is not None:
            axes.barh(place + 0.2, each.measured / scale, height=0.36, color="C0", label=None if place else each.origin)
        if each.low is not None and each.high is not None:
            axes.plot([each.low / scale, each.high / scale], [place - 0.2] * 2, color="0.25", lw=1.2, marker="|")
    axes.set_yticks(range(len(found)), [short(name) for name, _ in found])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend(loc="lower right", fontsize=8)


def _unit(largest: float, *, memory: bool) -> tuple[float, str]:
    if memory:
        unit, one = memory_unit(largest)
        return float(one), unit
    return (1.0, "s") if largest >= 1.0 else (1e-3, "ms")
