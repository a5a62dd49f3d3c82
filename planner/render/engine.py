"""Templates to text: where the templates lie and how they are filled.

Templates decide layout only; every value is computed in Python, and a name that a template asks for and nobody gave is
an error.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def templates_dir() -> Path:
    """The folder of templates: inside the installed package, or at the top of a checkout."""
    packaged = Path(str(files("planner"))) / "templates"
    return packaged if packaged.is_dir() else packaged.parent.parent / "templates"


@cache
def _environment(*, html: bool) -> Environment:
    return Environment(
        loader=FileSystemLoader(templates_dir()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Shell, Python, JSON and Markdown: HTML escaping would corrupt them, quoting is done where values are computed.
        autoescape=html,
    )


def fill(template: str, context: dict[str, Any]) -> str:
    """The text of ``template`` (path below the templates folder) with the values of ``context``."""
    return _environment(html=False).get_template(template).render(context)


def fill_html(template: str, context: dict[str, Any]) -> str:
    """As ``fill``, for HTML: every value that is not ``Markup`` is escaped."""
    return _environment(html=True).get_template(template).render(context)
