"""Clients of the service: what schedulers and scripts use to ask it for a plan and to start what it answers.

Needs neither the web framework nor the server's settings; only talking to a server needs httpx."""
