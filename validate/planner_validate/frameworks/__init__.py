"""The framework itself on the rendered files: how it is started, and what its log says."""
