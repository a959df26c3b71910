"""What can go wrong with the database itself, each one line that says what to do."""

import sqlite3
import sys

import sqlalchemy as sa

__all__ = [
    "CommitFailedError",
    "DatabaseClosedError",
    "DatabaseError",
    "DatabaseInUseError",
    "DatabaseUnusableError",
    "InDoubtError",
    "database_errors",
    "first_line",
]


class DatabaseError(Exception):
    """The database could not do what was asked; nothing of it was stored, but for an InDoubtError."""


class DatabaseClosedError(DatabaseError):
    """The database is being closed, or its writer died: nothing is accepted any more."""


class DatabaseInUseError(DatabaseError):
    """Another server process holds this SQLite database."""


class DatabaseUnusableError(DatabaseError):
    """The database cannot be opened, or its schema is not the one this program needs."""


class CommitFailedError(DatabaseError):
    """The group that this transaction was part of could not be committed. Its work is undone."""


class InDoubtError(DatabaseError):
    """The connection broke in mid-commit: whether the transaction is stored is not known."""


def first_line(error: BaseException) -> str:
    """What the driver said, without the statement and the advice that SQLAlchemy adds."""
    cause = getattr(error, "orig", None) or error
    text = str(cause).strip()
    return text.splitlines()[0] if text else type(cause).__name__


def database_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Everything that says that the database is away, full or locked, and `others`, for `except`: our
    errors, SQLAlchemy's, and the driver's own, which hot statements let through.
    """
    # The driver of a database that is not used is not loaded for this.
    psycopg = sys.modules.get("psycopg")
    driver = () if psycopg is None else (psycopg.Error,)
    return (DatabaseError, sa.exc.SQLAlchemyError, sqlite3.Error, *driver, *others)
