"""Fixtures that every test may ask for; they are written in `tests/fixtures`."""

import os
import signal

from tests.fixtures.databases import (
    database,
    database_url,
    postgres_database,
    postgres_server,
    postgres_template,
    postgres_url,
    sqlite_database,
    sqlite_template,
)
from tests.fixtures.times import clock, ids

# Programs that tests start get what a user's shell gives them: this would hide a line never flushed.
os.environ.pop("PYTHONUNBUFFERED", None)
# A shell starts what it puts into the background deaf to interrupts, and so would be all our children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = [
    "clock",
    "database",
    "database_url",
    "ids",
    "postgres_database",
    "postgres_server",
    "postgres_template",
    "postgres_url",
    "sqlite_database",
    "sqlite_template",
]
