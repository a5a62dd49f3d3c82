"""Where text goes: results to stdout, everything else to stderr, colour only where somebody can see it.

Piped output is plain ASCII, 100 columns wide, without colour or control sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_COLUMNS = 100

Justify = Literal["left", "right"]


def stdout() -> Console:
    """Console of the result; rich itself honours NO_COLOR and FORCE_COLOR."""
    return _console(stderr=False)


def stderr() -> Console:
    """Console of errors and progress."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr,
        width=None if terminal else PIPED_COLUMNS,
        highlight=False,
        emoji=False,
        markup=False,
        soft_wrap=False,
    )


def table(
    headers: Sequence[tuple[str, Justify]],
    rows: Sequence[Sequence[str]],
    *,
    marked: int | None = None,
    tight: bool = False,
) -> Table:
    """A table without vertical lines; row ``marked`` is bold (and carries its own mark in the text).

    ``tight``: single spaces between columns and no wrapping inside a cell.
    """
    console = stdout()
    grid = Table(
        box=box.SIMPLE_HEAD if console.is_terminal and not console.options.ascii_only else ASCII_HEAD,
        pad_edge=False,
        padding=0 if tight else (0, 1, 0, 0),
        header_style="bold",
        show_edge=False,
    )
    for header, justify in headers:
        grid.add_column(header, justify=justify, overflow="fold", no_wrap=tight)
    for index, row in enumerate(rows):
        grid.add_row(*(Text(cell) for cell in row), style="bold green" if index == marked else "")
    return grid


ASCII_HEAD = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
"""Only a line of dashes under the header."""


@contextmanager
def progress(*, quiet: bool, what: str = "searching") -> Iterator[Callable[[object], None] | None]:
    """A spinner with the current step on stderr while the body runs; nothing where stderr is not a terminal."""
    console = stderr()
    if quiet or not console.is_terminal:
        yield None
        return
    with console.status(what) as status:
        yield lambda state: status.update(str(state))
