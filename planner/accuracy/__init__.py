"""Predicted against measured: reads published runs, predicts each from its configuration alone, and reports the
error."""
