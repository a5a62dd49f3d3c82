"""The planner as an HTTP service: REST for schedulers and programs, and a page for people."""
