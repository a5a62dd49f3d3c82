"""Runs one command line and turns its end into an exit code: done, an error that is printed, Ctrl-C, lost output.

The commands themselves stand in app.py.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from planner.cli.app import EXIT_INTERRUPTED, EXIT_OK, app
from planner.errors import InputError, PlannerError
from planner.version import __version__

GARBAGE_THRESHOLD = 200_000
"""New objects before the collector runs (Python: 700)."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors are printed, as JSON with --json."""
    as_json, debug = "--json" in arguments, "--debug" in arguments
    try:
        result = app(args=list(arguments), prog_name="planner", standalone_mode=False)
    except KeyboardInterrupt:
        result = EXIT_INTERRUPTED
    except Exception as problem:
        if debug:
            _traceback(problem)
        if isinstance(problem, OSError) and problem.errno in OUTPUT_LOST:
            return _lost(problem)
        return _report(_expected(problem), as_json)
    # The option parser turns Ctrl-C into this code without a word.
    if result == EXIT_INTERRUPTED:
        sys.stderr.write("interrupted\n")
    return result if isinstance(result, int) else EXIT_OK


def _traceback(problem: Exception) -> None:
    import traceback

    sys.stderr.write("".join(traceback.format_exception(problem)))


def _expected(problem: Exception) -> PlannerError:
    """The error as ours: usage errors of the option parser are bad input, anything unknown is our bug."""
    if isinstance(problem, PlannerError):
        return problem
    describe: Any = getattr(problem, "format_message", None)
    if describe is not None and getattr(problem, "exit_code", None) == InputError.exit_code:
        command = getattr(getattr(problem, "ctx", None), "command_path", "planner")
        return InputError(str(describe()), hint=f"`{command} --help` lists the options")
    return PlannerError(
        f"internal error in planner {__version__}: {type(problem).__name__}: {problem}",
        hint="please report it with the command line; --debug shows the traceback",
    )


OUTPUT_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
"""A full disk or a reader that has gone; the planner's own files are written by code that reports on them itself."""


def _lost(problem: OSError) -> int:
    """Standard output takes nothing more: said on stderr even with --json, and not again when Python flushes at its
    end."""
    from planner.cli import problems

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    error = InputError(
        f"the output cannot be written: {problem.strerror}",
        where="standard output",
        hint="write to a disk with free space, or keep the reading program open",
    )
    if problem.errno != errno.EPIPE:
        problems.print_error(error)
    return error.exit_code


def _report(error: PlannerError, as_json: bool) -> int:
    from planner.cli import problems

    if as_json:
        problems.print_json(error.to_dict())
    else:
        problems.print_error(error)
    return error.exit_code


def main() -> None:
    """Entry point of the console script."""
    # Importing makes hundreds of thousands of lasting objects; collecting them costs a tenth of a short run.
    gc.set_threshold(GARBAGE_THRESHOLD)
    # A name that the terminal's encoding lacks is shown escaped instead of ending in an encoding error.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError as problem:
        code = _lost(problem)
    sys.exit(code)
