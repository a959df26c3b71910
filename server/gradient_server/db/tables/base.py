"""What every table shares: the metadata, the column types and the naming of constraints.

Times are float seconds since the epoch, sizes bytes, lengths of time seconds, unless a name says
otherwise. One schema serves SQLite and PostgreSQL.
"""

import sqlalchemy as sa

__all__ = ["BigKey", "Time", "check_in", "metadata"]

metadata = sa.MetaData(
    naming_convention={
        "ix": "idx-%(table_name)s-%(column_0_N_name)s",
        "uq": "uq-%(table_name)s-%(column_0_N_name)s",
        "ck": "ck-%(table_name)s-%(constraint_name)s",
        "fk": "fk-%(table_name)s-%(column_0_name)s",
        "pk": "pk-%(table_name)s",
    }
)

Time = sa.Double
# SQLite numbers rows by itself only where the type is spelled INTEGER.
BigKey = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def check_in(column: str, words: type) -> sa.CheckConstraint:
    """A constraint that holds `column` to the members of a StrEnum."""
    listed = ", ".join(f"'{word}'" for word in words)  # type: ignore[attr-defined]  # an enum class iterates
    return sa.CheckConstraint(f"{column} IN ({listed})", name=f"{column}-known")
