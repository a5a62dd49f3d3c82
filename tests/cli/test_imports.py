"""Start-up stays light: help and the bare import load nothing heavy, and no command loads a training framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SERVICE = ("fastapi", "starlette", "sqlalchemy", "alembic", "uvicorn", "procrastinate", "psycopg", "httpx", "structlog")
HEAVY = ("ortools", "numpy", "torch", "pandas", "jinja2", "yaml", "matplotlib", *SERVICE)


def loaded(code: str) -> set[str]:
    """Heavy modules that a fresh interpreter has loaded after ``code``."""
    script = f"import sys\n{code}\nsys.stderr.write(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stderr.split())


def test_import_is_light() -> None:
    """``import planner`` loads neither solver, web framework nor numpy."""
    assert loaded("import planner") == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *(
            [name, "--help"]
            for name in (
                "suggest",
                "estimate",
                "accuracy",
                "calibrate",
                "cluster",
                "validate",
                "serve",
                "worker",
                "tokens",
            )
        ),
        ["cluster", "from-topo", "--help"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_help_is_light(arguments: list[str]) -> None:
    """Help and version load nothing that a search needs."""
    assert loaded(f"from planner.cli.main import run\nassert run({arguments!r}) == 0") == set()


READ = [
    "cluster",
    "from-smi",
    str(Path(__file__).resolve().parents[1] / "data" / "machines" / "smi_8xh100.csv"),
    "--json",
]


@pytest.mark.parametrize(
    "arguments", [["models", "--json"], ["gpus", "--json"], ["backends", "--json"], READ], ids=lambda words: words[0]
)
def test_listings_need_no_solver(arguments: list[str]) -> None:
    """Looking something up loads neither CP-SAT nor a framework."""
    assert (
        loaded(f"from planner.cli.main import run\nassert run({arguments!r}) == 0") & {"ortools", "torch", *SERVICE}
        == set()
    )


def test_accuracy_needs_neither_solver_nor_plots() -> None:
    """Comparing with measured runs loads CP-SAT and matplotlib only when something is searched or plotted."""
    assert loaded("import planner.service") & {"ortools", "matplotlib", "torch"} == set()


def test_public_names() -> None:
    """``__all__`` is sorted, importable, and equal to what can be reached lazily."""
    import planner

    assert planner.__all__ == sorted(planner.__all__)
    for name in planner.__all__:
        assert getattr(planner, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'suggestt'"):
        _ = planner.suggestt


def test_a_plan_without_files_needs_no_renderer() -> None:
    """What `suggest` prints takes neither templates nor readers of files and machines."""
    asked = ["suggest", "--model", "gpt2-124m", "--gpus", "1", "--gpu", "a100", "--backend", "fsdp"]
    run = f"from planner.cli.main import run\nassert run({asked!r}) == 0\nimport sys"
    probe = 'assert not {"planner.render", "planner.reading", "planner.machines"} & set(sys.modules)'
    loaded(f"{run}\n{probe}")
