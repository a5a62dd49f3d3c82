"""A plan document as HTML: the section that the page shows, and one self-contained file that opens from disk.

The file needs no network and says so to the browser: its content security policy allows its own scripts and style by
their checksums, and nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path

from markupsafe import Markup

from planner.render.engine import fill_html
from planner.report.content import content_of
from planner.report.figures import pictures
from planner.specs.pictures import Pictures
from planner.specs.plan import PlanDocument

SCRIPTS = ("d3.min.js", "plot.min.js", "charts.js")
"""Files of ``static_dir`` in the order in which a page loads them."""
STYLES = ("plan.css",)


def static_dir() -> Path:
    """The folder of scripts and style sheets, ours and the vendored ones."""
    return Path(str(files("planner.report"))) / "static"


def plan_section(
    document: PlanDocument, drawn: Pictures | None = None, *, name: str = "plan", actions: str = ""
) -> Markup:
    """One ``<section>`` with everything about the document; ``name`` keeps its ids apart on a page with several,
    ``actions`` is HTML that follows the verdict.

    It says everything without scripts; with SCRIPTS loaded, its figures are drawn.
    """
    drawn = pictures(document) if drawn is None else drawn
    context = {
        "plan": content_of(document, drawn),
        "pictures": embedded(drawn),
        "name": name,
        "actions": Markup(actions),  # noqa: S704  (HTML by contract)
    }
    return Markup(fill_html("report/plan.html.j2", context))  # noqa: S704  (escaped by the template)


def html_report(document: PlanDocument, drawn: Pictures | None = None) -> str:
    """The whole file: style, scripts and figures inside."""
    scripts = [_static(name) for name in SCRIPTS]
    styles = [_static(name) for name in STYLES]
    request = document.request
    context = {
        "title": f"{request.model.name} on {request.cluster.gpus} x {request.cluster.accelerator.id}",
        "policy": policy(scripts, styles),
        "styles": [Markup(text) for text in styles],  # noqa: S704  (files of ours)
        "scripts": [Markup(text) for text in scripts],  # noqa: S704
        "section": plan_section(document, drawn),
        "version": document.planner_version,
        "document_id": document.id,
    }
    return fill_html("report/report.html.j2", context)


def policy(scripts: list[str], styles: list[str]) -> str:
    """A content security policy that loads nothing and runs these texts only."""
    ours = {"script-src": scripts, "style-src": styles}
    listed = [f"{kind} {' '.join(f'{_checksum(text)!r}' for text in texts)}" for kind, texts in ours.items()]
    return "; ".join(["default-src 'none'", *listed, "base-uri 'none'", "form-action 'none'"])


def _checksum(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _static(name: str) -> str:
    return (static_dir() / name).read_text(encoding="utf-8")


def embedded(drawn: Pictures) -> Markup:
    """The numbers as JSON that can stand in a script element: nothing in it can close the element or open a comment."""
    text = drawn.model_dump_json()
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)  # noqa: S704  (no markup is left)
