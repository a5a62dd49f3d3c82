"""Reads TrainJobs with the models of the package kubeflow_trainer_api: one JSON line a manifest, empty when accepted.

Called with YAML files; a field that the model drops counts as refused, because the API server would refuse it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from kubeflow_trainer_api import models  # type: ignore[import-not-found, unused-ignore]


def dropped(given: Any, kept: Any, path: str = "") -> str:
    """The first field of ``given`` that is not in ``kept``; empty when there is none."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                return f"{path}/{key}"
            if inner := dropped(value, kept[key], f"{path}/{key}"):
                return inner
    if isinstance(given, list):
        for index, value in enumerate(given):
            if not isinstance(kept, list) or index >= len(kept):
                return f"{path}/{index}"
            if inner := dropped(value, kept[index], f"{path}/{index}"):
                return inner
    return ""


def refusal(manifest: dict[str, Any]) -> str:
    """Why the model does not take a manifest."""
    try:
        read = models.TrainerV1alpha1TrainJob.from_dict(manifest)
    except Exception as error:  # whatever the model raises is a refusal
        return " ".join(str(error).split())[:300]
    lost = dropped(manifest, read.to_dict())
    return f"unknown field {lost}" if lost else ""


for name in sys.argv[1:]:
    print(json.dumps(refusal(yaml.safe_load(Path(name).read_text(encoding="utf-8")))))
