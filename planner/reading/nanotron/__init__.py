"""nanotron YAML; see reader.py."""
