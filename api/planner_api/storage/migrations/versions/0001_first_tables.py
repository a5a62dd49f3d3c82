"""Plans, tokens, measurements, idempotency keys, and on PostgreSQL the queue's own tables."""

import sqlalchemy as sa
from alembic import op
from procrastinate.schema import SchemaManager

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "plans",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("question", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("outcome", sa.String(16)),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("finished_at", sa.Float),
        sa.Column("heard_at", sa.Float),
        sa.Column("worker", sa.String(200)),
        sa.Column("cancel", sa.Boolean, nullable=False),
        sa.Column("progress", sa.Text),
        sa.Column("problem", sa.Text),
        sa.Column("result", sa.Text),
        sa.Column("cut_at_s", sa.Float),
    )
    op.create_index("plans_by_state", "plans", ["state", "created_at"])
    op.create_index("plans_by_time", "plans", ["created_at", "id"])
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
    )
    op.create_table(
        "measurements",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("accelerator", sa.String(100), nullable=False),
        sa.Column("framework", sa.String(100), nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_index("measurements_by_accelerator", "measurements", ["accelerator", "created_at"])
    op.create_index("measurements_by_time", "measurements", ["created_at", "id"])
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("key", sa.String(200), primary_key=True),
        sa.Column("body_sha256", sa.String(64), nullable=False),
        sa.Column("answered", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        # Only without parameters does the driver pass several statements, and percent signs, as they are; SQLAlchemy
        # itself always passes some.
        cursor = op.get_bind().connection.cursor()
        cursor.execute(SchemaManager.get_schema())
        cursor.close()


def downgrade() -> None:
    for table in ("idempotency_keys", "measurements", "tokens", "plans"):
        op.drop_table(table)
