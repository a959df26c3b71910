"""When a derivation was last said to be known, and who names a source: for garbage collection."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies the revision."""
    op.add_column("derivation", sa.Column("used_at", sa.Double(), nullable=True))
    op.create_index("idx-derivation_source-path", "derivation_source", ["path"])
    op.create_index("idx-evaluation-source_path", "evaluation", ["source_path"])


def downgrade() -> None:
    """Undoes the revision."""
    op.drop_index("idx-evaluation-source_path", "evaluation")
    op.drop_index("idx-derivation_source-path", "derivation_source")
    op.drop_column("derivation", "used_at")
