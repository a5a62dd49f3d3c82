"""Megatron-LM arguments and logs (reader.py) and Megatron-Bridge overrides (bridge.py)."""
