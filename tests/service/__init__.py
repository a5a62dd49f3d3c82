"""The service as processes: nothing is lost, nothing is done twice, limits hold."""
