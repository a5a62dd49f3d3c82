"""DeepSpeed configurations; see reader.py."""
