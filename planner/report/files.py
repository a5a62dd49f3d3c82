"""Reports as files: which kinds there are, whether they can be written, and writing them whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import InputError
from planner.service.outputs import check_target, write_file
from planner.specs.problems import shown

if TYPE_CHECKING:
    from planner.specs.plan import PlanDocument

OPTION = "--report"
SUFFIXES = (".html", ".md")


def check_reports(paths: Sequence[Path], *, force: bool, out: Path | None = None) -> None:
    """Refuse files of an unknown kind or that cannot be written, before a search is spent on them; ``out`` is the
    folder that the launch files are written into."""
    for index, path in enumerate(paths):
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(
                "the name does not say what kind of report this is",
                where=OPTION,
                got=shown(str(path)),
                allowed=" or ".join(SUFFIXES),
                hint="end the name with .html for a page with figures, or .md for a pull request",
            )
        check_target(path, OPTION, force=force, others=[(other, OPTION) for other in paths[:index]], made=out)


def check_beside(paths: Sequence[Path], out: Path, names: Iterable[str]) -> None:
    """Refuse a report in the place of a launch file, whether or not files may be replaced."""
    for path in paths:
        check_target(path, OPTION, force=True, others=[(out / name, "--out") for name in names], made=out)


def write_reports(document: PlanDocument, paths: Sequence[Path]) -> None:
    """Write ``document`` into every file, as its suffix says."""
    for path in paths:
        write_file(path, _report(document, path.suffix.lower()).encode(), OPTION)


def _report(document: PlanDocument, suffix: str) -> str:
    if suffix == ".html":
        from planner.report.html import html_report

        return html_report(document)
    from planner.report.markdown import markdown_report

    return markdown_report(document)
