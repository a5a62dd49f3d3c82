"""Which interpreter runs the frameworks' own parsers, and what it lacks.

PLANNER_PARSERS_PYTHON names one that tests/parsers/install.sh made; otherwise it is the interpreter of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

PYTHON = str(Path(os.environ.get("PLANNER_PARSERS_PYTHON") or sys.executable).absolute())
INSTALL = "tests/parsers/install.sh .venv-parsers, and PLANNER_PARSERS_PYTHON=.venv-parsers/bin/python"


@cache
def lacking(*needed: str) -> str:
    """Why the parsers cannot run, for a skip; empty if all modules, or files of namespace packages, are found.

    ``needed`` holds modules (``torch``) and paths inside a package (``megatron/training/arguments.py``).
    """
    probe = (
        "import importlib.util as u, os, sys\n"
        "def found(name):\n"
        "    package, *rest = name.split('/')\n"
        "    spec = u.find_spec(package)\n"
        "    folders = (spec and spec.submodule_search_locations) or []\n"
        "    return bool(spec) and (not rest or any(os.path.exists(os.path.join(f, *rest)) for f in folders))\n"
        "print(*(name for name in sys.argv[1:] if not found(name)), sep=', ')"
    )
    done = subprocess.run([PYTHON, "-c", probe, *needed], capture_output=True, text=True, check=False)
    missing = done.stdout.strip() if done.returncode == 0 else "a working interpreter"
    return f"{PYTHON} has no {missing}: {INSTALL}" if missing else ""


@cache
def parser(*packages: str) -> str:
    """Names and versions of packages in that interpreter: "torch 2.13.0, deepspeed 0.19.8"."""
    probe = "import importlib.metadata as m, sys; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
    done = subprocess.run([PYTHON, "-c", probe, *packages], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def answers(runner: Path, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a runner says of the cases, in their order; all in one process, for the imports take seconds."""
    done = subprocess.run(
        [PYTHON, str(runner)],
        input="".join(json.dumps(case) + "\n" for case in cases),
        capture_output=True,
        text=True,
        check=False,
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(cases), done.stderr[-3000:]
    return results
