"""What the server's NAR store holds, and the uploads under way."""

import sqlalchemy as sa

from gradient_server.db.tables.base import Time, metadata

__all__ = ["cached_path", "cached_path_reference", "upload"]

cached_path = sa.Table(
    "cached_path",
    metadata,
    sa.Column("path", sa.Text, primary_key=True),
    # `sha256:<hex>` and size of the uncompressed NAR.
    sa.Column("nar_hash", sa.Text, nullable=False),
    sa.Column("nar_size", sa.BigInteger, nullable=False),
    sa.Column("file_size", sa.BigInteger, nullable=False),
    sa.Column("compression", sa.Text, nullable=False),
    # The object in the NAR store; paths with equal contents may share one.
    sa.Column("object", sa.Text, nullable=False, index=True),
    sa.Column("contains_store_dir", sa.Boolean, nullable=False, default=False),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("used_at", Time, nullable=False),
)

# Kept apart from the path itself, for a reference may be known before its own path is.
cached_path_reference = sa.Table(
    "cached_path_reference",
    metadata,
    sa.Column("path", sa.ForeignKey("cached_path.path", ondelete="CASCADE"), primary_key=True),
    sa.Column("reference", sa.Text, primary_key=True, index=True),
)

upload = sa.Table(
    "upload",
    metadata,
    sa.Column("request", sa.Text, primary_key=True),
    sa.Column("worker", sa.Text, nullable=False),
    sa.Column("assignment", sa.Text, nullable=False, index=True),
    sa.Column("path", sa.Text, nullable=False, index=True),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("lease_until", Time, nullable=False, index=True),
    # A cluster member's finished upload waits here for the verdict (protocol.md, Build steps).
    sa.Column("nar_hash", sa.Text),
    sa.Column("nar_size", sa.BigInteger),
    sa.Column("object", sa.Text),
    sa.Column("file_size", sa.BigInteger),
    sa.Column("compression", sa.Text),
    sa.Column("references", sa.JSON(none_as_null=True)),
    sa.Column("committed", sa.Boolean, nullable=False, default=False),
)
