"""Constants from measured runs: the published fit with its validation and ranges, and profiles of somebody's own
machines."""
