"""Speed and memory budgets, run by hand: ``python -m pytest tests/bench -m bench -s``."""
