"""Reads the configuration files that checkpoints come with; the only public name is ``read_model_config``."""

from planner.catalog.huggingface.reader import ModelReading, read_model_config

__all__ = ["ModelReading", "read_model_config"]
