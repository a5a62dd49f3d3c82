"""This machine measured: what is timed, how it becomes a profile."""
