"""The tables; times are seconds since 1970 (UTC), so that both databases compare them alike."""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text

metadata = MetaData()

plans = Table(
    "plans",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("question", Text, nullable=False),  # the request's body and the profile it means, as JSON
    Column("state", String(16), nullable=False),
    Column("outcome", String(16)),
    Column("attempts", Integer, nullable=False, default=0),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    Column("heard_at", Float),  # last sign of life of the worker
    Column("worker", String(200)),
    Column("cancel", Boolean, nullable=False, default=False),
    Column("progress", Text),
    Column("problem", Text),
    Column("result", Text),
    Column("cut_at_s", Float),  # the service's limit of time, where that ended the search early
    Index("plans_by_state", "state", "created_at"),
    Index("plans_by_time", "created_at", "id"),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(100), nullable=False),
    Column("secret_sha256", String(64), nullable=False),
    Column("scope", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
)

measurements = Table(
    "measurements",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("accelerator", String(100), nullable=False),
    Column("framework", String(100), nullable=False),
    Column("record", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("measurements_by_accelerator", "accelerator", "created_at"),
    Index("measurements_by_time", "created_at", "id"),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("owner", String(64), primary_key=True),
    Column("key", String(200), primary_key=True),
    Column("body_sha256", String(64), nullable=False),
    Column("answered", Boolean, nullable=False, default=False),
    Column("created_at", Float, nullable=False),
)
