"""torchtitan command lines, registry modules and TOML; see reader.py."""
