"""What every request passes before it reaches a route: limits, host names, tokens, ids, logs."""
