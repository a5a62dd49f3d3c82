"""``python -m planner`` is the ``planner`` command."""

from __future__ import annotations

from planner.cli.main import main

if __name__ == "__main__":
    main()
