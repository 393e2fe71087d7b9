"""Pins: beginnings of prompts that are never evicted."""

import sqlalchemy as sa
from alembic import op

revision = "0.3.0"
down_revision = "0.2.0"
branch_labels = None
depends_on = None

# What the way back takes away.
LOST = {"pins": "SELECT count(*) FROM pin"}


def upgrade() -> None:
    op.create_table(
        "pin",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("namespace_id", sa.Integer, nullable=False),
        sa.Column("tokens", sa.LargeBinary, nullable=False),
        sa.Column("created", sa.REAL, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pin"),
        sa.ForeignKeyConstraint(["namespace_id"], ["namespace.id"], name="fk_pin_namespace_id"),
    )
    op.create_index("ix_pin_namespace_id", "pin", ["namespace_id"])


def downgrade() -> None:
    op.drop_table("pin")
