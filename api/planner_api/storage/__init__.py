"""What the service remembers: plans, tokens, measurements and idempotency keys, in SQLite or PostgreSQL."""
