"""The service as processes: killed, restarted, several at once, ended."""
