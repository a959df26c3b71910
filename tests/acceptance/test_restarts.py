"""Server, agent and runner are ended in mid-build: nothing is built twice, and no line of a log is lost."""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.counting import Counting, Under
from tests.acceptance.counting import begin as begin_counting
from tests.acceptance.pool import Pool
from tests.acceptance.processes import program, wait_until

TERM_AND_KILL = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)


@pytest.fixture(scope="module")
def restarted() -> Iterator[Pool]:
    """A server and one worker that the tests restart. Retries are quick."""
    with Pool() as made:
        made.start_server("--build-retry-backoff-secs", "0.2", "--scheduler-scoring-policy", "simple")
        made.start_worker("host-a", "--build-max-concurrent", "2")
        yield made


@pytest.fixture(autouse=True)
def _let_go(tmp_path: Path) -> Iterator[None]:
    """Whatever became of a test, its build does not keep the next one from a slot."""
    yield
    (tmp_path / "go").touch()


def begin(pool: Pool, name: str, directory: Path) -> Under:
    """Submits a build and waits until its log arrives."""
    return begin_counting(pool, Counting(name, directory))


@TERM_AND_KILL
def test_the_server_is_restarted_in_mid_build(
    restarted: Pool, tmp_path: Path, number: signal.Signals
) -> None:
    under = begin(restarted, f"through-server-{number.value}.0", tmp_path)
    assert restarted.server is not None
    before = restarted.log_size(under.job)
    with subprocess.Popen(
        [program("gradient"), "logs", "-f", under.job],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=restarted.environment(),
    ) as follower:
        code = restarted.server.end(number)
        # Whoever follows a log is let go too.
        assert follower.wait(20) in (0, 3)
    assert code == (0 if number is signal.SIGTERM else -number)
    time.sleep(1)
    restarted.restart_server()
    under.wait_for_log(restarted, before + 10)
    under.finish(restarted)


def test_a_watched_build_outlives_a_restart_of_the_server(restarted: Pool, tmp_path: Path) -> None:
    counting = Counting("watched-1.0", tmp_path)
    with subprocess.Popen(
        [program("gradient"), "build", str(restarted.tree(counting.build))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=restarted.environment(),
    ) as watching:
        try:
            wait_until("the build's start", counting.starts)
            assert restarted.server is not None
            assert restarted.server.end(signal.SIGTERM) == 0
            restarted.restart_server()
            counting.go()
            output, errors = watching.communicate(timeout=60)
        finally:
            watching.kill()
    assert watching.returncode == 0, errors
    assert output.splitlines()[-1].endswith("-watched-1.0")
    assert counting.starts() == 1


@TERM_AND_KILL
def test_the_agent_is_restarted_in_mid_build(restarted: Pool, tmp_path: Path, number: signal.Signals) -> None:
    under = begin(restarted, f"through-agent-{number.value}.0", tmp_path)
    before = restarted.log_size(under.job)
    agent = restarted.workers["host-a"].process
    code = agent.end(number)
    assert code == (0 if number is signal.SIGTERM else -number)
    time.sleep(1)
    restarted.restart_worker("host-a")
    under.wait_for_log(restarted, before + 10)
    under.finish(restarted)


def test_a_build_that_ends_while_no_agent_is_there_is_reported_by_the_next(
    restarted: Pool, tmp_path: Path
) -> None:
    under = begin(restarted, "unattended-1.0", tmp_path)
    wait_until("some lines", lambda: restarted.log_size(under.job) > 20)
    restarted.workers["host-a"].process.end(signal.SIGKILL)
    under.counting.go()
    time.sleep(1)
    restarted.restart_worker("host-a")
    under.finish(restarted)


def test_a_build_whose_runner_is_killed_is_built_again(restarted: Pool, tmp_path: Path) -> None:
    under = begin(restarted, "runnerless-1.0", tmp_path)
    runner = restarted.workers["host-a"].runner()
    assert runner is not None
    runner.kill()
    under.finish_again(restarted, "the process that ran the build died")
