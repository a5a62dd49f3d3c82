"""Short real training runs of plans, and how they compare with the estimates.

Everything that imports torch stands in this package; what the command line imports of it does not."""
