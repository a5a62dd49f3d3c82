"""Python beside or as a configuration: the module as a syntax tree, and what its names are set to as literals.

Nothing of a file is run."""

from __future__ import annotations

import ast
from typing import Any

from planner.errors import InputError


def parse_python(name: str, text: str) -> ast.Module:
    """The module; InputError with the line where it is none."""
    try:
        return ast.parse(text.removeprefix("\ufeff"))
    # The others come of zero bytes and of nesting.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        line, reason = getattr(problem, "lineno", None), getattr(problem, "msg", None) or str(problem)
        raise InputError(
            f"this is not Python: {reason[:120] or 'it is nested too deeply'}",
            where=f"{name}:{line}" if line else name,
            hint="correct the line" if line else "correct the file",
        ) from problem


def assignment(statement: ast.stmt) -> tuple[str, ast.expr]:
    """``NAME = value`` or ``NAME: type = value`` of a module; an empty name for everything else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target, value = statement.target, statement.value
    else:
        return "", ast.Constant(None)
    return (target.id if isinstance(target, ast.Name) else ""), value


def literal(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal, in a tuple of one; None for anything else."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def literals(module: ast.Module) -> dict[str, Any]:
    """The names that a module sets to literals, with the last of each."""
    assigned = (assignment(statement) for statement in module.body)
    return {name: value[0] for name, node in assigned if name and (value := literal(node)) is not None}
