"""First schema: settings, namespaces, radix nodes, checkpoints, digests of model files."""

import sqlalchemy as sa
from alembic import op

revision = "0.1.0"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "setting",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_setting"),
    )
    op.create_table(
        "namespace",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(32), nullable=False),
        sa.Column("label", sa.Text, nullable=False),
        sa.Column("ingredients", sa.Text, nullable=False),
        sa.Column("block_tokens", sa.Integer, nullable=False),
        sa.Column("prefill_rate", sa.REAL),
        sa.Column("restore_rate", sa.REAL),
        sa.Column("created", sa.REAL, nullable=False),
        sa.Column("used", sa.REAL, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_namespace"),
        sa.UniqueConstraint("fingerprint", name="uq_namespace_fingerprint"),
    )
    op.create_table(
        "node",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("namespace_id", sa.Integer, nullable=False),
        sa.Column("key", sa.LargeBinary(32), nullable=False),
        sa.Column("parent", sa.LargeBinary(32), nullable=False),
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
        sa.PrimaryKeyConstraint("id", name="pk_node"),
        sa.UniqueConstraint("key", name="uq_node_key"),
        sa.ForeignKeyConstraint(["namespace_id"], ["namespace.id"], name="fk_node_namespace_id"),
    )
    op.create_index("ix_node_anchor_path", "node", ["anchor", "path"])
    op.create_index("ix_node_parent", "node", ["parent"])
    op.create_index("ix_node_used", "node", ["used"])
    op.create_index("ix_node_blob", "node", ["blob"])
    op.create_index("ix_node_namespace_id", "node", ["namespace_id"])
    op.create_table(
        "checkpoint",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("namespace_id", sa.Integer, nullable=False),
        sa.Column("kind", sa.Integer, nullable=False),
        sa.Column("seq_id", sa.Integer, nullable=False),
        sa.Column("pos", sa.Integer, nullable=False),
        sa.Column("prefix", sa.LargeBinary(32), nullable=False),
        sa.Column("anchor", sa.LargeBinary(32), nullable=False),
        sa.Column("path", sa.LargeBinary, nullable=False),
        sa.Column("blob", sa.LargeBinary(32), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger, nullable=False),
        sa.Column("plain_bytes", sa.BigInteger, nullable=False),
        sa.Column("created", sa.REAL, nullable=False),
        sa.Column("used", sa.REAL, nullable=False),
        sa.Column("hits", sa.Integer, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoint"),
        sa.UniqueConstraint("seq_id", "pos", "prefix", "kind", name="uq_checkpoint_seq_id_pos_prefix_kind"),
        sa.ForeignKeyConstraint(["namespace_id"], ["namespace.id"], name="fk_checkpoint_namespace_id"),
    )
    op.create_index("ix_checkpoint_anchor", "checkpoint", ["anchor"])
    op.create_index("ix_checkpoint_used", "checkpoint", ["used"])
    op.create_index("ix_checkpoint_blob", "checkpoint", ["blob"])
    op.create_index("ix_checkpoint_namespace_id", "checkpoint", ["namespace_id"])
    op.create_table(
        "file_digest",
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("mtime_ns", sa.BigInteger, nullable=False),
        sa.Column("ctime_ns", sa.BigInteger, nullable=False),
        sa.Column("inode", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.PrimaryKeyConstraint("path", name="pk_file_digest"),
    )
