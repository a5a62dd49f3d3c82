"""Reads the configuration files that checkpoints come with; from disk or as data."""

from planner.catalog.huggingface.reader import ModelReading, read_model_config, read_model_fields

__all__ = ["ModelReading", "read_model_config", "read_model_fields"]
