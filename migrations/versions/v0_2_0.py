"""Sliding windows: a table of their own; and checkpoints are looked for along a path."""

import sqlalchemy as sa
from alembic import op

revision = "0.2.0"
down_revision = "0.1.0"
branch_labels = None
depends_on = None

# 0.1.0 knows whole states only: it takes checkpoints of another kind for damage, and the blocks of a memory that has more
# parts than these for all of it.
_OF_PARTS = "SELECT namespace_id FROM window UNION SELECT namespace_id FROM checkpoint WHERE kind <> 2"

# What the way back takes away.
LOST = {
    "entries of sliding windows": "SELECT count(*) FROM window",
    "checkpoints of recurrent tensors": "SELECT count(*) FROM checkpoint WHERE kind <> 2",
    "blocks of models with either": f"SELECT count(*) FROM node WHERE namespace_id IN ({_OF_PARTS})",
}


def upgrade() -> None:
    op.create_table(
        "window",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("namespace_id", sa.Integer, nullable=False),
        sa.Column("key", sa.LargeBinary(32), nullable=False),
        sa.Column("anchor", sa.LargeBinary(32), nullable=False),
        sa.Column("path", sa.LargeBinary, nullable=False),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("n_tokens", sa.Integer, nullable=False),
        sa.Column("blob", sa.LargeBinary(32), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger, nullable=False),
        sa.Column("plain_bytes", sa.BigInteger, nullable=False),
        sa.Column("created", sa.REAL, nullable=False),
        sa.Column("used", sa.REAL, nullable=False),
        sa.Column("hits", sa.Integer, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_window"),
        sa.UniqueConstraint("key", name="uq_window_key"),
        sa.ForeignKeyConstraint(["namespace_id"], ["namespace.id"], name="fk_window_namespace_id"),
    )
    op.create_index("ix_window_anchor_path", "window", ["anchor", "path"])
    op.create_index("ix_window_used", "window", ["used"])
    op.create_index("ix_window_blob", "window", ["blob"])
    op.create_index("ix_window_namespace_id", "window", ["namespace_id"])
    op.drop_index("ix_checkpoint_anchor", "checkpoint")
    op.create_index("ix_checkpoint_anchor_path", "checkpoint", ["anchor", "path"])


def downgrade() -> None:
    op.execute(f"DELETE FROM node WHERE namespace_id IN ({_OF_PARTS})")
    op.execute("DELETE FROM checkpoint WHERE kind <> 2")
    op.drop_index("ix_checkpoint_anchor_path", "checkpoint")
    op.create_index("ix_checkpoint_anchor", "checkpoint", ["anchor"])
    op.drop_table("window")
