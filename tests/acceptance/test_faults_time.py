"""Silence, blocked loops, a locked database and clocks that are off: real processes whose time is altered."""

import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.acceptance.alter import BLOCK, Wall, altered
from tests.acceptance.counting import Cost, Counting, begin
from tests.acceptance.pool import Pool, by_name
from tests.acceptance.processes import is_alive, wait_until
from tests.acceptance.trees import Build

# `GRADIENT_LONG_FAULTS=1`: half a minute, and SQLite itself waits for a lock as long as it does, 10 s.
LONG = os.environ.get("GRADIENT_LONG_FAULTS") == "1"
# Of 10 s, 120 s, 60 s, 120 s and 30 s: a tenth or less of what they are.
HEARTBEAT_SECS = 0.4
SILENCE_SECS = 1.5
GRACE_SECS = 20.0 if LONG else 4.0  # longer than a loop is blocked
ORPHAN_SECS = 1.0
BACKOFF_SECS = 1.0
HEARTBEATS = {"gradient_protocol.limits:HEARTBEAT_SECS": HEARTBEAT_SECS}
# Longer than anybody waits for a silent peer: sessions end. Within the grace: they resume.
BLOCKED_SECS = 15.0 if LONG else 2.2
BUSY = {} if LONG else {"gradient_server.db.engine:BUSY_TIMEOUT_MS": 200}
LOCKED_SECS = 30.0 if LONG else 2.0
HOUR_SECS = 3600.0


@pytest.fixture(autouse=True)
def _let_go(tmp_path: Path) -> Iterator[None]:
    """Whatever became of a test, its builds end."""
    tmp_path.chmod(0o777)
    yield
    (tmp_path / "go").touch()


@dataclass(frozen=True)
class Hasty:
    """A pool in which nobody has much patience, and the wall clocks of its two hosts."""

    pool: Pool
    server_clock: Wall
    worker_clock: Wall

    def sessions(self) -> int:
        """How many the worker has had."""
        return (self.pool.directory / "host-a.log").read_text().count('"event": "connected"')


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hasty]:
    """The worker's wall clock is off by an hour from the beginning."""
    clocks = tmp_path_factory.mktemp("clocks")
    server, worker = Wall(clocks / "server"), Wall(clocks / "worker", HOUR_SECS)
    with Pool() as made:
        made.start_server(
            "--build-retry-backoff-secs", str(BACKOFF_SECS), "--scheduler-scoring-policy", "simple",
            "--proto-worker-heartbeat-timeout-secs", str(SILENCE_SECS),
            "--proto-reconnect-grace-secs", str(GRACE_SECS),
            environment=altered(wall=server, constants=BUSY, block_secs=BLOCKED_SECS),
        )  # fmt: skip
        environment = altered(wall=worker, constants=HEARTBEATS, block_secs=BLOCKED_SECS)
        made.start_worker("host-a", environment=environment)
        yield Hasty(made, server, worker)


def start(pool: Pool, name: str, *flags: str) -> None:
    """A worker that beats quickly."""
    pool.start_worker(name, *flags, environment=altered(constants=HEARTBEATS))


def test_an_agent_never_comes_back(hasty: Hasty, tmp_path: Path, cost: Cost) -> None:
    pool = hasty.pool
    start(pool, "host-gone", "--system-features", "gone", "--orphan-kill-secs", str(ORPHAN_SECS))
    under = begin(pool, Counting("gone-1.0", tmp_path, more={"features": ["gone"]}))
    runner = pool.workers["host-gone"].runner()
    assert runner is not None
    start(pool, "host-heir", "--system-features", "gone")
    cost.begin(f"no agent comes back (grace {GRACE_SECS:g} s, orphans {ORPHAN_SECS:g} s)")
    pool.workers["host-gone"].process.end(signal.SIGKILL)
    wait_until("a second start", lambda: under.counting.starts() == 2)
    cost.useful(again=1)
    # Its runner has ended the first one, and itself.
    wait_until("the end of the first start", lambda: not is_alive(under.counting.pids[0]))
    psutil.wait_procs([runner], 30)
    assert not is_alive(runner.pid)
    under.finish_again(pool, "its worker was lost")
    pool.stop_worker("host-heir")


def test_a_worker_is_silent_until_its_job_went_elsewhere(hasty: Hasty, tmp_path: Path, cost: Cost) -> None:
    pool = hasty.pool
    start(pool, "host-still", "--system-features", "still")
    under = begin(pool, Counting("still-1.0", tmp_path, more={"features": ["still"]}))
    start(pool, "host-next", "--system-features", "still")
    agent = pool.workers["host-still"].process
    cost.begin(f"worker stopped (silence {SILENCE_SECS:g} s, grace {GRACE_SECS:g} s), and woken too late")
    agent.send(signal.SIGSTOP)
    try:
        wait_until("a second start", lambda: under.counting.starts() == 2)
        cost.useful(again=1)
        # Its build ends while it cannot say so.
        under.counting.go()
        view = pool.ended(under.evaluation)
        assert view["status"] == "Completed"
        wait_until("the end of the first start", lambda: not is_alive(under.counting.pids[0]))
        before = pool.get(f"/jobs/{under.job}")["attempts"]
        assert [attempt["worker"] for attempt in before] == ["host-next", "host-still"]
    finally:
        agent.send(signal.SIGCONT)
    log = pool.directory / "host-still.log"
    wait_until("a new session", lambda: log.read_text().count('"event": "connected"') == 2)
    late = pool.submit(pool.tree(Build("late-1.0", more={"features": ["still"]})))
    assert pool.ended(late)["status"] == "Completed"
    # What it reported late changed nothing.
    assert pool.get(f"/jobs/{under.job}")["attempts"] == before
    assert by_name(pool.evaluation(under.evaluation))["still-1.0"]["status"] == "Completed"
    assert under.counting.starts() == 2
    for name in ("host-still", "host-next"):
        pool.stop_worker(name)


def test_event_loops_are_blocked(hasty: Hasty, tmp_path: Path, cost: Cost) -> None:
    """The agent's, then the server's. Their other threads go on, as where something computes in the loop."""
    pool = hasty.pool
    under = begin(pool, Counting("blocked-1.0", tmp_path))
    for side, blocked in {"agent": pool.workers["host-a"].process, "server": pool.server}.items():
        assert blocked is not None
        size, sessions = pool.log_size(under.job), hasty.sessions()
        cost.begin(f"event loop of the {side} blocked for {BLOCKED_SECS:g} s, longer than its peer waits")
        blocked.send(signal.Signals[BLOCK])
        time.sleep(BLOCKED_SECS)
        under.wait_for_log(pool, size)
        cost.useful(without=BLOCKED_SECS)
        wait_until("the next session", lambda before=sessions: hasty.sessions() > before)  # type: ignore[misc]  # bound now
    under.finish(pool)


def test_the_database_is_locked(hasty: Hasty, tmp_path: Path, cost: Cost) -> None:
    """Several times as long as SQLite waits, while a build ends."""
    pool = hasty.pool
    under = begin(pool, Counting("locked-1.0", tmp_path))
    under.wait_for_log(pool, 30)
    sessions = hasty.sessions()
    other = sqlite3.connect(pool.server_dir / "gradient.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    under.counting.go()
    size = pool.log_size(under.job)
    time.sleep(LOCKED_SECS)
    # Neither logs nor what is only read need the lock.
    assert pool.log_size(under.job) > size
    assert pool.evaluation(under.evaluation)["status"] == "Building"
    assert pool.is_ready()
    cost.begin(f"SQLite database locked by another process for {LOCKED_SECS:g} s")
    other.close()
    view = pool.ended(under.evaluation)
    cost.useful()
    assert view["status"] == "Completed"
    under.finish(pool)
    after = pool.submit(pool.tree(Build("after-1.0")))
    assert pool.ended(after)["status"] == "Completed"
    assert hasty.sessions() == sessions


def times_of(pool: Pool, job: str) -> list[tuple[float, float]]:
    """The tries and their spans, each from its start to its end. The spans are as the server stored them."""
    attempts = pool.get(f"/jobs/{job}")["attempts"]
    database = sqlite3.connect(f"file:{pool.server_dir}/gradient.db?mode=ro", uri=True)
    query = 'SELECT s.start, s."end" FROM span s JOIN dispatched_job j ON j.id = s.assignment'
    spans = database.execute(f"{query} WHERE j.job_key = ?", [job]).fetchall()
    database.close()
    assert spans
    return [(attempt["started_at"], attempt["finished_at"]) for attempt in attempts] + spans


def test_the_clocks_of_both_hosts_are_set_in_mid_build(hasty: Hasty, tmp_path: Path, cost: Cost) -> None:
    """Each the other way, and back."""
    pool = hasty.pool
    for hours in (1, -1):
        directory = tmp_path / f"by-{hours}"
        directory.mkdir()
        directory.chmod(0o777)
        # Fails once for want of its runner, and waits for its backoff then.
        under = begin(pool, Counting(f"timed-{hours % 3}.0", directory))
        cost.begin(
            f"clock of the server set by {hours:+d} h and of its worker by {-2 * hours:+d} h in mid-build"
        )
        hasty.server_clock.set(HOUR_SECS if hours > 0 else 0)
        hasty.worker_clock.set(-hours * HOUR_SECS)
        runner = pool.workers["host-a"].runner()
        assert runner is not None
        runner.kill()
        began = time.monotonic()
        wait_until("a second start", lambda under=under: under.counting.starts() == 2)  # type: ignore[misc]  # bound now
        assert 0.9 * BACKOFF_SECS < time.monotonic() - began < 30, "neither skipped nor an hour longer"
        cost.useful(again=1, without=BACKOFF_SECS)
        under.finish_again(pool, "the process that ran the build died")
        now = time.time()
        for start, end in times_of(pool, under.job):
            assert 0 <= end - start < 60, "nothing took an hour"
            assert abs(start - now) < 120, "it is told when it was, on the server's clock"
    log = (pool.directory / "server.log").read_text()
    assert log.count("the host's clock was set") == 1, "by the way back, the server's time has hardly moved"
