"""${message.capitalize()}."""
# ruff: noqa: PLR0915, E501 - a list of statements, as Alembic spells them

import sqlalchemy as sa
from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies the revision."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Undoes the revision."""
    ${downgrades if downgrades else "pass"}
