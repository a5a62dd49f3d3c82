"""Writes the description of the API as it is committed in ``api/openapi.json``."""

from __future__ import annotations

import json
import sys

from planner_api.app import create_app


def text() -> str:
    """The file's text; the server's version is no part of the interface."""
    return json.dumps(create_app().openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
