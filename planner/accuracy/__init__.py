"""Predicted against measured: published runs become questions (runs), are priced (predict.py) and compared
(comparison); constants and ranges come from the same errors (fits)."""
