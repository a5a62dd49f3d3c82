"""The wheel holds the package, its data and its templates, nothing generic, and works outside the checkout."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"planner": ROOT, "planner_api": ROOT / "api", "planner_validate": ROOT / "validate"}
# What a package cannot do without and an import would not miss: at least one file of each kind.
PARTS = {
    "the page": r"planner/templates/page/.+\.j2",
    "the page's scripts and styles": r"planner_api/.*static/.+\.(js|css)",
    "the steps from one version of the database to the next": r"planner_api/.*migrations/.*versions/\w+\.py",
    "the report's scripts": r"planner/report/static/.+\.js",
    "the licences of the scripts that are not ours": r"planner/report/static/.*LICENSE.*",
    "the report's layout": r"planner/templates/report/.+\.j2",
}


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in ``folder``, its output kept."""
    return subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built by the backend alone: no network."""
    folder = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_contents(wheel: Path) -> None:
    """Three top-level packages; every module, data file and template and the type markers are inside."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    for folder, top in PACKAGES.items():
        for path in (top / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.relative_to(top).as_posix() in names
    templates = [path for path in (ROOT / "templates").rglob("*") if path.is_file()]
    assert templates
    for path in templates:
        assert f"planner/{path.relative_to(ROOT).as_posix()}" in names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.parametrize("part", PARTS)
def test_parts_that_no_import_misses(wheel: Path, part: str) -> None:
    """Pages, scripts, layouts and migrations are read when they are needed only, so they are looked for here."""
    assert any(re.fullmatch(PARTS[part], name) for name in zipfile.ZipFile(wheel).namelist())


def test_same_from_the_source_archive(wheel: Path, tmp_path: Path) -> None:
    """The source archive builds the same wheel, and what deploys and tests the service lies in it."""
    made = run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, folder=ROOT)
    assert made.returncode == 0, made.stdout + made.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    assert {"deploy/Dockerfile", "docs/service.md", "tests/postgres.py"} <= {
        path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()
    }
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, folder=source)
    assert built.returncode == 0, built.stdout + built.stderr
    (second,) = tmp_path.glob("*.whl")
    first_files, second_files = zipfile.ZipFile(wheel), zipfile.ZipFile(second)
    assert set(first_files.namelist()) == set(second_files.namelist())
    for name in first_files.namelist():
        assert first_files.read(name) == second_files.read(name), name


def test_public_records(wheel: Path) -> None:
    """The measured runs behind the published error, and the table that it is held to, come with the package."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("planner/accuracy/data/")}
    assert "planner/accuracy/data/baseline.json" in names
    assert len([name for name in names if name.endswith(".jsonl.gz")]) == len(
        list((ROOT / "planner" / "accuracy" / "data").glob("*.jsonl.gz"))
    )


def test_metadata(wheel: Path) -> None:
    """Name, command and version are the published ones, and no test tool is required."""
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = archive.read(info).decode()
    scripts = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    from planner import __version__

    assert "Name: parallel-planner\n" in metadata
    assert f"Version: {__version__}\n" in metadata
    assert "planner = planner.cli.main:main" in scripts
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert {line.split()[1].split(">")[0] for line in required} == {
        "jinja2", "numpy", "ortools", "pydantic", "pyyaml", "rich", "typer",
    }  # fmt: skip


def test_installed(wheel: Path, tmp_path: Path) -> None:
    """Installed in an environment of its own, the command answers and renders outside the checkout."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    binaries = environment / ("Scripts" if sys.platform == "win32" else "bin")
    python = binaries / "python"
    done = run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        wheel,
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (packages,) = environment.glob("lib/python*/site-packages")
    # The dependencies of this environment, without its own (editable) planner.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    where = run(python, "-I", "-c", "import planner; print(planner.__file__)", folder=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(environment), where.stdout + where.stderr
    assert "suggest" in run(binaries / "planner", "--help", folder=tmp_path).stdout
    service = run(python, "-I", "-c", "import planner_api.app as app; print(app.__file__)", folder=tmp_path)
    assert Path(service.stdout.strip()).is_relative_to(environment), service.stdout + service.stderr
    plan = run(
        binaries / "planner", "suggest", "--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100",
        "--backend", "fsdp", "--out", "files", folder=tmp_path,
    )  # fmt: skip
    assert plan.returncode == 0, plan.stderr
    assert (tmp_path / "files" / "plan.json").is_file()
    again = run(binaries / "planner", "render", "files/plan.json", "--out", "again", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    first = {path.relative_to(tmp_path / "files"): path.read_bytes() for path in (tmp_path / "files").rglob("*.*")}
    second = {path.relative_to(tmp_path / "again"): path.read_bytes() for path in (tmp_path / "again").rglob("*.*")}
    assert first == second
