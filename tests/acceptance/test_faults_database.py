"""The server's database is stopped, or put back from an older copy, under real builds."""

import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.counting import Cost, Counting, begin
from tests.acceptance.pool import Pool, by_name
from tests.acceptance.processes import wait_until
from tests.fixtures.databases import PostgresTemplate

# `GRADIENT_LONG_FAULTS=1`: half a minute.
AWAY_SECS = 30.0 if os.environ.get("GRADIENT_LONG_FAULTS") == "1" else 2.0
QUICK = ("--build-retry-backoff-secs", "0.2", "--scheduler-scoring-policy", "simple")


@pytest.fixture(autouse=True)
def _let_go(tmp_path: Path) -> Iterator[None]:
    """Whatever became of a test, its builds end."""
    tmp_path.chmod(0o777)
    yield
    (tmp_path / "go").touch()


def assert_ready(pool: Pool, *, is_ready: bool) -> None:
    """What the server says of itself."""
    assert pool.server is not None
    assert pool.server.code is None, pool.logs()
    assert pool.is_ready() is is_ready


def test_postgresql_is_restarted(
    empty_pool: Pool, tmp_path: Path, postgres_template: PostgresTemplate, cost: Cost
) -> None:
    """Stopped as by its operator, while one build ends and while nothing can be stored."""
    pool, postgres = empty_pool, postgres_template.server
    name = postgres.create()
    pool.start_server(*QUICK, "--proto-advertise-url", pool.listen, "--database-url", postgres.url(name))
    pool.start_worker("host-a")
    under = begin(pool, Counting("away-1.0", tmp_path))
    under.wait_for_log(pool, 30)
    postgres.halt()
    try:
        under.counting.go()
        time.sleep(AWAY_SECS)
        assert_ready(pool, is_ready=False)
    finally:
        cost.begin(f"PostgreSQL stopped for {AWAY_SECS:g} s")
        postgres.start()
    view = pool.ended(under.evaluation)
    cost.useful()
    assert view["status"] == "Completed"
    under.finish(pool)
    assert_ready(pool, is_ready=True)
    assert (pool.directory / "host-a.log").read_text().count('"event": "connected"') == 1
    assert pool.server is not None
    pool.server.end(signal.SIGTERM)
    postgres.drop(name)


def test_the_database_is_put_back_from_an_older_copy(empty_pool: Pool, tmp_path: Path, cost: Cost) -> None:
    """From when one build ran that has ended since, and before another was even submitted that runs now."""
    pool = empty_pool
    pool.start_server(*QUICK)
    pool.start_worker("host-a", "--system-features", "first", "--build-max-concurrent", "3")
    pool.start_worker("host-b", "--system-features", "second")
    early, late, going = (tmp_path / name for name in ("early", "late", "going"))
    for directory in (early, late, going):
        directory.mkdir()
        directory.chmod(0o777)
    ended = begin(pool, Counting("early-1.0", early, more={"features": ["first"]}))
    runs = begin(pool, Counting("going-1.0", going))
    copy = tmp_path / "copy.db"
    with sqlite3.connect(pool.server_dir / "gradient.db") as source, sqlite3.connect(copy) as target:
        source.backup(target)
    source.close()
    target.close()
    ended.finish(pool)
    unknown = begin(pool, Counting("late-1.0", late, more={"features": ["second"]}))
    assert pool.server is not None
    pool.server.end(signal.SIGKILL)
    for leftover in pool.server_dir.glob("gradient.db-*"):
        leftover.unlink()
    shutil.copy(copy, pool.server_dir / "gradient.db")
    cost.begin("database put back from before a build's end and before another one's submission")
    pool.restart_server()
    # The one that ended is asked for again; its worker has what it made, and starts nothing.
    view = pool.ended(ended.evaluation)
    cost.useful()
    assert view["status"] == "Completed", view
    assert ended.counting.starts() == 1
    # The one that runs in both goes on.
    runs.finish(pool)
    # The one that nobody knows any more ends at once.
    wait_until("the end of an unknown build", lambda: not unknown.counting.left())
    again = pool.submit(pool.tree(Counting("late-1.0", tmp_path, more={"features": ["second"]}).build))
    (tmp_path / "go").touch()
    view = pool.ended(again)
    assert by_name(view)["late-1.0"]["status"] == "Completed"
    assert not (late / "go").exists()
