"""Until when the survivors of a try are waited for."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies the revision."""
    op.add_column("cluster_attempt", sa.Column("survivors_until", sa.Double(), nullable=True))


def downgrade() -> None:
    """Undoes the revision."""
    op.drop_column("cluster_attempt", "survivors_until")
