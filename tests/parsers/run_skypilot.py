"""Reads task files with SkyPilot's own classes: one JSON line a file, empty when accepted, else the refusal.

Called with JSON lines on standard input: the task as a document and the variables that a user would give with --env.
"""

from __future__ import annotations

import json
import sys

import sky  # type: ignore[import-not-found, unused-ignore]

for line in sys.stdin:
    case = json.loads(line)
    try:
        task = sky.Task.from_yaml_config(case["task"], case["env"])
        # The rest of validate() asks the catalogue, which lies in the network.
        task.validate_name()
        task.validate_run()
        got = {
            "nodes": task.num_nodes,
            "accelerators": [resources.accelerators for resources in task.resources],
            "run": bool(task.run),
            "refusal": "",
        }
    except Exception as error:  # whatever SkyPilot raises is a refusal
        got = {"refusal": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    print(json.dumps(got), flush=True)
