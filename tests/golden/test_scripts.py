"""Every rendered script and configuration is well-formed: the shell, shellcheck, JSON and Python accept it."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from planner.render import render_plan, write_files
from tests.golden.plans import CASES, case_names


@pytest.fixture(params=list(CASES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The files of one case on disk."""
    case = CASES[request.param]
    write_files(tmp_path / "out", render_plan(case.document, launcher=case.launcher, hosts=case.hosts))
    return tmp_path / "out"


def scripts(folder: Path) -> list[str]:
    """Names of the shell scripts."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".sh", ".sbatch"))


def test_bash_accepts_every_script(folder: Path) -> None:
    """``bash -n`` finds no syntax error."""
    for name in scripts(folder):
        result = subprocess.run(["bash", "-n", name], cwd=folder, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_no_objection(folder: Path) -> None:
    """shellcheck, following the sourced file, is silent."""
    result = subprocess.run(
        ["shellcheck", "-x", *scripts(folder)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_json_and_python_parse(folder: Path) -> None:
    """JSON files are JSON, YAML files YAML, Python modules Python, and everything ends in exactly one newline."""
    for path in folder.iterdir():
        text = path.read_text(encoding="utf-8")
        assert text.endswith("\n"), path.name
        assert not text.endswith("\n\n"), path.name
        if path.suffix == ".json":
            json.loads(text)
        if path.suffix == ".yaml":
            assert isinstance(yaml.safe_load(text), dict)
        if path.suffix == ".py":
            ast.parse(text)


def test_scripts_are_executable_and_sourced_files_are_not(folder: Path) -> None:
    """What starts with a shebang can be started."""
    for path in folder.iterdir():
        starts = path.read_text(encoding="utf-8").startswith("#!")
        assert bool(path.stat().st_mode & 0o100) == starts, path.name


def test_no_line_has_trailing_space(folder: Path) -> None:
    """Templates leave no blanks at line ends."""
    for path in folder.iterdir():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert line == line.rstrip(), f"{path.name}:{number}"


FAKE_TORCHRUN = '#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n'


def started_with(folder: Path, **variables: str) -> list[str]:
    """Arguments that ``launch.sh`` gives to torchrun."""
    tools = folder.parent / "tools"
    tools.mkdir()
    (tools / "torchrun").write_text(FAKE_TORCHRUN)
    (tools / "torchrun").chmod(0o755)
    result = subprocess.run(
        ["bash", str(folder / "launch.sh"), "--extra"],
        env={
            "PATH": f"{tools}:/usr/bin:/bin",
            "MEGATRON_PATH": "/opt/megatron",
            "TRAIN_SCRIPT": "train.py",
            "HEAD_NODE": "n1",
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def write(name: str, tmp_path: Path) -> Path:
    """The files of a named case on disk."""
    write_files(tmp_path / "out", render_plan(CASES[name].document))
    return tmp_path / "out"


def test_single_node_launch_is_standalone(tmp_path: Path) -> None:
    """One node needs no rendezvous, and what the user adds comes last."""
    words = started_with(write("megatron-offload", tmp_path))
    assert words[:4] == ["--standalone", "--nproc-per-node", "8", "/opt/megatron/pretrain_gpt.py"]
    assert words[-1] == "--extra"


def test_several_nodes_meet_at_the_head_node(tmp_path: Path) -> None:
    """Without a node number the c10d rendezvous is used."""
    words = started_with(write("fsdp-full", tmp_path), HEAD_NODE="head", JOB_ID="7")
    assert words[words.index("--rdzv-id") + 1] == "7"
    assert words[words.index("--rdzv-endpoint") + 1] == "head:29500"
    assert "--node-rank" not in words


def test_a_node_number_makes_the_rendezvous_static(tmp_path: Path) -> None:
    """With a node number ranks are fixed."""
    words = started_with(write("fsdp-full", tmp_path), HEAD_NODE="head", NODE_RANK="3")
    assert words[words.index("--node-rank") + 1] == "3"
    assert words[words.index("--master-addr") + 1] == "head"
    assert "--rdzv-backend" not in words


@pytest.mark.parametrize("name", case_names("megatron"))
def test_megatron_runs_on_mock_data_unless_told(name: str, tmp_path: Path) -> None:
    """Without DATA_PATH there is mock data; with it the real data and a tokenizer replace it."""
    folder = write(name, tmp_path)
    mock = started_with(folder)
    assert "--mock-data" in mock
    (tmp_path / "tools" / "torchrun").unlink()
    (tmp_path / "tools").rmdir()
    real = started_with(folder, DATA_PATH="/data/a b", TOKENIZER_MODEL="tok", CHECKPOINT_DIR="/ckpt")
    assert real[real.index("--data-path") + 1] == "/data/a b"
    assert real[real.index("--save") + 1] == "/ckpt"
    assert "--mock-data" not in real
