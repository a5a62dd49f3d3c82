"""Measurements beside predictions: terms, verdict, suspects, and the report in its forms."""
