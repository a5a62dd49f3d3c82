"""Names of models come from whoever asks: in what is rendered they change comments and prose, and nothing that runs."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from planner import service
from planner.backends import BACKENDS
from planner.service import ClusterInput, JobInput, StrategyInput
from planner.specs.launcher import Launcher
from planner.specs.plan import PlanDocument

LAUNCHERS = ",".join(get_args(Launcher))
HOSTILE = (
    "{{ 7 * 7 }}{% raw %}",
    "${HOME} $(touch injected) `touch injected`",
    "a\ntouch injected\n#",
    "a\r\ntouch injected",
    "a'; touch injected; '",
    'a"; touch injected; "',
    "a \\",
    '"""\nimport os\nos.system("touch injected")\n"""',
    "<script>alert(1)</script>",
    "x: y\n- !!python/object/apply:os.system ['touch injected']",
    "%YAML 1.2 &a *a | > ? !",
    "EOF\ntouch injected",
    "\u2028touch injected\u2029",
    "\x00\x1b[31m\x07",
    "a" * 200,
)


DATA = ("plan.json", "run.json")
"""Files of the planner's own, with the name as data."""


def renamed(content: Any, name: str) -> Any:
    """A document with the name for ``plain``."""
    if isinstance(content, dict):
        return {key: renamed(value, name) for key, value in content.items()}
    if isinstance(content, list):
        return [renamed(value, name) for value in content]
    return name if content == "plain" else content


def planned(backend: str) -> PlanDocument:
    machines = ClusterInput(gpu="h100", gpus=8)
    return service.estimate("llama-3-8b", machines, JobInput(), StrategyInput(), backend=backend)


def named(document: PlanDocument, name: str) -> PlanDocument:
    """The same plan of a model with another name."""
    model = document.request.model.model_copy(update={"name": name})
    return document.model_copy(update={"request": document.request.model_copy(update={"model": model})})


def what_counts(name: str, text: str) -> object:
    """What a reader other than a person makes of a file."""
    if name.endswith((".yaml", ".yml")):
        return list(yaml.safe_load_all(text))
    if name.endswith(".json"):
        return json.loads(text)
    if name.endswith(".py"):
        return _without_docstrings(ast.parse(text))
    return [line for line in text.split("\n") if not line.lstrip().startswith("#")]


def _without_docstrings(module: ast.Module) -> str:
    for node in ast.walk(module):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(module)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_name_changes_nothing_that_runs(backend: str, tmp_path: Path) -> None:
    document = planned(backend)
    plain = service.render_document(named(document, "plain"), launcher=LAUNCHERS)
    for number, name in enumerate(HOSTILE):
        files = service.render_document(named(document, name), launcher=LAUNCHERS)
        assert list(files) == list(plain)
        for file, text in files.items():
            if file in DATA:
                assert json.loads(text) == renamed(json.loads(plain[file]), name)
            elif not file.endswith(".md"):
                assert what_counts(file, text) == what_counts(file, plain[file]), (file, name)
            if file.endswith((".sh", ".sbatch")):
                script = tmp_path / f"{number}-{Path(file).name}"
                script.write_text(text)
                subprocess.run(["bash", "-n", script], check=True)
