"""Silence, blocked loops and clocks that are off: real processes whose time a test alters."""

import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.acceptance.alter import BLOCK, Wall, altered
from tests.acceptance.counting import Cost, Counting, begin
from tests.acceptance.pool import Pool, by_name
from tests.acceptance.processes import is_alive, wait_until
from tests.acceptance.trees import Build

# Of 10 s, 120 s, 60 s and 120 s: everything a tenth or less of what it is.
HEARTBEAT_SECS = 0.4
SILENCE_SECS = 1.5
GRACE_SECS = 1.0
ORPHAN_SECS = 1.0
HEARTBEATS = {"gradient_protocol.limits:HEARTBEAT_SECS": HEARTBEAT_SECS}
# Longer than everybody's patience with a silent peer, so that sessions end and resume.
BLOCKED_SECS = 3.0
HOUR_SECS = 3600.0
BACKOFF_SECS = 2.0


@pytest.fixture(autouse=True)
def _let_go(tmp_path: Path) -> Iterator[None]:
    """Whatever became of a test, its builds end."""
    tmp_path.chmod(0o777)
    yield
    (tmp_path / "go").touch()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Pool]:
    """Nobody has much patience."""
    with Pool() as made:
        made.start_server(
            "--build-retry-backoff-secs", "0.2", "--scheduler-scoring-policy", "simple",
            "--proto-worker-heartbeat-timeout-secs", str(SILENCE_SECS),
            "--proto-reconnect-grace-secs", str(GRACE_SECS),
        )  # fmt: skip
        start(made, "host-a")
        yield made


def start(pool: Pool, name: str, *flags: str) -> None:
    """A worker that beats quickly."""
    pool.start_worker(name, *flags, environment=altered(constants=HEARTBEATS))


def test_an_agent_never_comes_back(hasty: Pool, tmp_path: Path, cost: Cost) -> None:
    start(hasty, "host-gone", "--system-features", "gone", "--orphan-kill-secs", str(ORPHAN_SECS))
    under = begin(hasty, Counting("gone-1.0", tmp_path, more={"features": ["gone"]}))
    runner = hasty.workers["host-gone"].runner()
    assert runner is not None
    start(hasty, "host-heir", "--system-features", "gone")
    cost.begin(f"no agent comes back (grace {GRACE_SECS:g} s, orphans {ORPHAN_SECS:g} s)")
    hasty.workers["host-gone"].process.end(signal.SIGKILL)
    wait_until("a second start", lambda: under.counting.starts() == 2)
    cost.useful(again=1)
    # Its runner has ended the first one, and itself.
    wait_until("the end of the first start", lambda: not is_alive(under.counting.pids[0]))
    psutil.wait_procs([runner], 30)
    assert not is_alive(runner.pid)
    under.finish_again(hasty, "its worker was lost")
    hasty.stop_worker("host-heir")


def test_a_worker_is_silent_until_its_job_went_elsewhere(hasty: Pool, tmp_path: Path, cost: Cost) -> None:
    start(hasty, "host-still", "--system-features", "still")
    under = begin(hasty, Counting("still-1.0", tmp_path, more={"features": ["still"]}))
    start(hasty, "host-next", "--system-features", "still")
    agent = hasty.workers["host-still"].process
    cost.begin(f"worker stopped (silence {SILENCE_SECS:g} s, grace {GRACE_SECS:g} s), and woken too late")
    agent.send(signal.SIGSTOP)
    try:
        wait_until("a second start", lambda: under.counting.starts() == 2)
        cost.useful(again=1)
        # Its build ends while it cannot say so.
        under.counting.go()
        view = hasty.ended(under.evaluation)
        assert view["status"] == "Completed"
        wait_until("the end of the first start", lambda: not is_alive(under.counting.pids[0]))
        before = hasty.get(f"/jobs/{under.job}")["attempts"]
        assert [attempt["worker"] for attempt in before] == ["host-next", "host-still"]
    finally:
        agent.send(signal.SIGCONT)
    log = hasty.directory / "host-still.log"
    wait_until("a new session", lambda: log.read_text().count('"event": "connected"') == 2)
    late = hasty.submit(hasty.tree(Build("late-1.0", more={"features": ["still"]})))
    assert hasty.ended(late)["status"] == "Completed"
    # What it reported late changed nothing.
    assert hasty.get(f"/jobs/{under.job}")["attempts"] == before
    assert by_name(hasty.evaluation(under.evaluation))["still-1.0"]["status"] == "Completed"
    assert under.counting.starts() == 2
    for name in ("host-still", "host-next"):
        hasty.stop_worker(name)


def test_event_loops_are_blocked(empty_pool: Pool, tmp_path: Path, cost: Cost) -> None:
    """The agent's, then the server's. Their other threads go on, as where something computes in the loop."""
    pool = empty_pool
    pool.start_server(
        "--scheduler-scoring-policy", "simple", "--proto-worker-heartbeat-timeout-secs", str(SILENCE_SECS),
        environment=altered(block_secs=BLOCKED_SECS),
    )  # fmt: skip
    pool.start_worker("host-a", environment=altered(constants=HEARTBEATS, block_secs=BLOCKED_SECS))
    under = begin(pool, Counting("blocked-1.0", tmp_path))
    for number, (side, blocked) in enumerate(
        {"agent": pool.workers["host-a"].process, "server": pool.server}.items()
    ):
        assert blocked is not None
        size = pool.log_size(under.job)
        cost.begin(f"event loop of the {side} blocked for {BLOCKED_SECS:g} s, twice what its peer waits")
        blocked.send(signal.Signals[BLOCK])
        time.sleep(BLOCKED_SECS)
        under.wait_for_log(pool, size)
        cost.useful(without=BLOCKED_SECS)
        sessions = (pool.directory / "host-a.log").read_text().count('"event": "connected"')
        assert sessions == number + 2, "it was not long enough to end a session"
    under.finish(pool)


def times_of(pool: Pool, job: str) -> list[tuple[float, float]]:
    """The tries and their spans, each from its start to its end. The spans are as the server stored them."""
    attempts = pool.get(f"/jobs/{job}")["attempts"]
    database = sqlite3.connect(f"file:{pool.server_dir}/gradient.db?mode=ro", uri=True)
    query = 'SELECT s.start, s."end" FROM span s JOIN dispatched_job j ON j.id = s.assignment'
    spans = database.execute(f"{query} WHERE j.job_key = ?", [job]).fetchall()
    database.close()
    assert spans
    return [(attempt["started_at"], attempt["finished_at"]) for attempt in attempts] + spans


def test_the_clocks_of_both_hosts_are_set_in_mid_build(empty_pool: Pool, tmp_path: Path, cost: Cost) -> None:
    """The worker's is off by an hour from the beginning; then both are set, each the other way, and back."""
    pool = empty_pool
    server, worker = Wall(tmp_path / "server-clock"), Wall(tmp_path / "worker-clock", HOUR_SECS)
    pool.start_server(
        "--scheduler-scoring-policy", "simple", "--build-retry-backoff-secs", str(BACKOFF_SECS),
        environment=altered(wall=server),
    )  # fmt: skip
    pool.start_worker("host-a", environment=altered(wall=worker, constants=HEARTBEATS))
    for hours in (1, -1):
        directory = tmp_path / f"by-{hours}"
        directory.mkdir()
        directory.chmod(0o777)
        # Fails once for want of its runner, and waits for its backoff then.
        under = begin(pool, Counting(f"timed-{hours % 3}.0", directory))
        cost.begin(
            f"clock of the server set by {hours:+d} h and of its worker by {-2 * hours:+d} h in mid-build"
        )
        server.set(HOUR_SECS if hours > 0 else 0)
        worker.set(-hours * HOUR_SECS)
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
