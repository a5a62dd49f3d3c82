"""Predictions beside measurements: classes, tables, plots, the published page and the table that CI holds."""
