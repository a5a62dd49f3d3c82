"""Writes docs/accuracy.md, its two plots, the README's table and the committed table of errors.

``make accuracy`` runs it in the repository; the same code and records give the same files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from jinja2 import Environment, StrictUndefined

from planner.accuracy.comparison import baseline, plot
from planner.accuracy.comparison.classes import MAX_GRID_GPUS
from planner.accuracy.comparison.report import SMALLEST_SWEEP, Scored, report, scored
from planner.accuracy.fits.calibration import KNOBS, MEMORY
from planner.accuracy.fits.transfer import SETS, transfer
from planner.accuracy.fits.validated import effects
from planner.accuracy.runs.records import DATA, PUBLIC, Records, public_records, read_records
from planner.cost.constants import fitted_constants, meaning_of
from planner.cost.uncertainty import measured_ranges
from planner.specs.accuracy import AccuracyDocument, Errors, Grouping, TimeRow
from planner.specs.measurement import MeasuredRun
from planner.units import percent

TEMPLATE = Path(__file__).with_name("page.md.j2")
PLOTS = {"step time": "accuracy-step-time.svg", "peak memory": "accuracy-memory.svg"}


def main(folder: Path) -> None:
    """Everything below ``folder`` (the repository)."""
    records = public_records()
    rows = scored(records.runs)
    document = report(rows, records, name=PUBLIC)
    docs = folder / "docs"
    docs.mkdir(exist_ok=True)
    for panel, name in PLOTS.items():
        (docs / name).write_bytes(plot.scatter(rows, [panel], "svg"))
    (docs / "accuracy.md").write_text(page(document, rows, records), encoding="utf-8")
    readme = folder / "README.md"
    readme.write_text(with_summary(readme.read_text(encoding="utf-8"), document), encoding="utf-8")
    baseline.FILE.write_text(baseline.text_of(baseline.table_of(document)), encoding="utf-8")


MARKS = ("<!-- accuracy: written by make accuracy -->\n", "<!-- /accuracy -->\n")


def with_summary(text: str, document: AccuracyDocument) -> str:
    """``text`` (README.md) with the short table between its marks."""
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    return f"{before}{MARKS[0]}{summary(document)}\n{MARKS[1]}{after}"


def summary(document: AccuracyDocument) -> str:
    """The step-time table in short."""
    rows = []
    for row in document.step_time:
        if row.errors is not None and row.validation is not None:
            errors = (row.errors, row.validation.without_group, row.validation.without_source)
            rows.append([row.group, str(row.errors.rows), *(f"{percent(e.median)} / {percent(e.p90)}" for e in errors)])
    return _table(("class", "runs", "error", "without its group", "without its source"), rows)


def page(document: AccuracyDocument, rows: Sequence[Scored], records: Records) -> str:
    """The text of docs/accuracy.md."""
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    others = [by for by in get_args(Grouping) if by != document.by]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        read=f"{document.read:,}",
        priced=f"{document.priced:,}",
        max_grid_gpus=MAX_GRID_GPUS,
        smallest_sweep=SMALLEST_SWEEP,
        step_time=_time_table(document),
        memory=_memory_table(document),
        fit=_fit_table(document),
        ranking=_ranking(document),
        excluded=_counts("step time not compared", document.excluded),
        skipped=_counts("not priced", document.skipped),
        groupings=[_time_table(report(rows, records, name=PUBLIC, by=by)) for by in others],
        factors=_factors(),
        transfer=_transfer(records.runs),
        sources=_sources(),
        fitted=len(fitted_constants()),
        constants=_constants(),
        effects=_effects(),
        ranges=_ranges(),
    )


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """A Markdown table; the first ``words`` columns are text."""
    rule = ["---" if index < words else "---:" for index in range(len(headers))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (headers, rule, *rows))


def _cells(errors: Errors | None) -> list[str]:
    if errors is None:
        return ["0", "", "", ""]
    return [str(errors.rows), percent(errors.median), percent(errors.p90), f"{100 * errors.bias:+.1f} %"]


_ERROR_HEADERS = ("runs", "median", "p90", "mean")


def _time_table(document: AccuracyDocument) -> str:
    rows = [
        [
            row.group,
            *_cells(row.errors),
            str(row.skipped),
            percent(row.assumed) if row.errors else "",
            _share(row.in_range),
            *_validated(row),
        ]
        for row in document.step_time
    ]
    more = ("without its group", "without its source") if any(row.validation for row in document.step_time) else ()
    return _table((document.by, *_ERROR_HEADERS, "not priced", "assumed", "in range", *more), rows)


def _validated(row: TimeRow) -> list[str]:
    """Median / 90th percentile by constants fitted without the run's group, and without its source."""
    if row.validation is None:
        return []
    parts = (row.validation.without_group, row.validation.without_source)
    return [f"{percent(errors.median)} / {percent(errors.p90)}" for errors in parts]


def _effects() -> str:
    """What each effect is worth: the growth of the error without it, in percentage points."""
    whole, *without = effects()
    rows = [["everything", f"{100 * whole.error:.1f} %", f"{100 * whole.recentred:.1f} %", ""]]
    for row in sorted(without, key=lambda row: row.recentred, reverse=True):
        added, centred = row.error - whole.error, row.recentred - whole.recentred
        rows.append([row.effect, f"{100 * added:+.1f}", f"{100 * centred:+.1f}", row.most_affected])
    return _table(("left out", "error", "after re-centring", "most affected class"), rows)


def _constants() -> str:
    """Every fitted constant with its prior."""
    rows = [
        [name, key, f"{fitted.value:.3g}", f"{fitted.prior:.3g}", f"{fitted.spread:g}", meaning_of(name)[0]]
        for (name, key), fitted in fitted_constants().items()
    ]
    return _table(("constant", "for", "value", "prior", "spread", "unit"), rows, words=2)


def _ranges() -> str:
    """The ranges of every class and how many left-out runs they hold."""
    rows = []
    for what, table in measured_ranges().items():
        for name, entry in table["classes"].items():
            low, high = entry["range"]
            coverage = percent(entry["coverage"]) if "coverage" in entry else ""
            rows.append([what, name, str(entry["runs"]), f"{low:.2f} to {high:.2f}", coverage])
        low, high = table["outside"]["class"]
        rows.append([what, "outside measured experience", "", f"{low:.2f} to {high:.2f}", ""])
    return _table(("figure", "class", "runs", "measured / predicted", "coverage"), rows, words=2)


def _memory_table(document: AccuracyDocument) -> str:
    rows = [[row.group, row.kind, *_cells(row.errors)] for row in document.memory_by_kind]
    return _table((document.by, "figure", *_ERROR_HEADERS), rows, words=2)


def _fit_table(document: AccuracyDocument) -> str:
    rows = [
        [
            row.group,
            str(row.ran_said_fits + row.ran_said_not),
            _share(row.false_misfits),
            str(row.oom_said_fits + row.oom_said_not),
            _share(row.false_fits),
        ]
        for row in document.fit
    ]
    return _table((document.by, "ran", "said not to fit", "out of memory", "said to fit"), rows)


def _share(ratio: float | None) -> str:
    return "" if ratio is None else percent(ratio)


def _ranking(document: AccuracyDocument) -> str:
    rows = [
        [
            sweep.source,
            sweep.model,
            str(sweep.gpus),
            str(sweep.seq_len or ""),
            str(sweep.rows),
            percent(sweep.regret),
            percent(sweep.top3_regret),
            f"{sweep.spearman:.2f}",
        ]
        for sweep in document.sweeps
        if sweep.grid
    ]
    headers = ("source", "model", "GPUs", "sequence", "runs", "top-1 regret", "top-3 regret", "Spearman")
    summary = document.ranking
    text = "" if summary is None else (
        f"{summary.sweeps} grids of layouts: mean top-1 regret {percent(summary.regret_mean)} (median "
        f"{percent(summary.regret_median)}, worst {percent(summary.regret_max)}), mean top-3 regret "
        f"{percent(summary.top3_regret_mean)}, median Spearman {summary.spearman_median:.2f}.\n\n"
    )  # fmt: skip
    return text + _table(headers, rows, words=2)


def _counts(title: str, counts: Mapping[str, int]) -> str:
    return _table((title, "runs"), [[name, str(rows)] for name, rows in counts.items()])


def _factors() -> str:
    rows = [[knob.name, knob.meaning, str(knob.runs), f"{knob.low:g} to {knob.high:g}"] for knob in (*KNOBS, MEMORY)]
    return _table(("factor", "on", "runs needed", "plausible"), rows, words=2)


def _transfer(runs: Sequence[MeasuredRun]) -> str:
    """One line a set of runs that plays an unknown framework."""
    rows = []
    for name in SETS:
        found = transfer(name, runs)
        rows.append([name, str(found.runs), percent(found.before), percent(found.after)])
    return _table(("played by", "runs", "before", "after one run"), rows)


def _sources() -> str:
    """One line a collection: its file, its records, the documents they were read from."""
    rows = []
    for path in sorted(DATA.glob("*.jsonl.gz")):
        runs = read_records([path]).runs
        documents = Counter(_document_of(run) for run in runs)
        names = [name for name, _ in documents.most_common(_SHOWN_DOCUMENTS)]
        more = len(documents) - len(names)
        text = "; ".join(names) + (f" and {more} more" if more > 0 else "")
        rows.append([path.name.removesuffix(".jsonl.gz"), text, str(len(runs))])
    return _table(("collection", "documents", "records"), rows, words=2)


_SHOWN_DOCUMENTS = 6


def _document_of(run: MeasuredRun) -> str:
    title = (run.source.title or "untitled").replace("|", "/")
    return f"{title} ({run.source.repo})" if run.source.repo else title


if __name__ == "__main__":
    main(Path.cwd())
