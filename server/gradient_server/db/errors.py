"""What can go wrong with the database itself, each one line that says what to do."""

__all__ = [
    "CommitFailedError",
    "DatabaseClosedError",
    "DatabaseError",
    "DatabaseInUseError",
    "DatabaseUnusableError",
]


class DatabaseError(Exception):
    """The database could not do what was asked; nothing of it was stored."""


class DatabaseClosedError(DatabaseError):
    """The database is being closed, or its writer died: nothing is accepted any more."""


class DatabaseInUseError(DatabaseError):
    """Another server process holds this SQLite database."""


class DatabaseUnusableError(DatabaseError):
    """The database cannot be opened, or its schema is not the one this program needs."""


class CommitFailedError(DatabaseError):
    """The group that this transaction was part of could not be committed. Its work is undone."""
