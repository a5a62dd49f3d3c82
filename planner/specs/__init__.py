"""Frozen inputs and results that every other part speaks in; nothing here computes a cost."""
