"""A server that is killed while members of a failed try still run: one try comes after the other."""

import signal
from pathlib import Path

from tests.acceptance.groups import Group
from tests.acceptance.pool import Pool
from tests.acceptance.processes import is_alive, wait_until


def test_a_killed_server_waits_on_for_the_survivors_of_a_try(empty_pool: Pool, tmp_path: Path) -> None:
    pool = empty_pool
    tmp_path.chmod(0o777)
    second, overlap = tmp_path / "second", tmp_path / "overlap"
    # In the second try nothing of the first may be left.
    look = (
        f"if test -e {second} && test -d /proc/$(head -n 1 {tmp_path}/member-1); then touch {overlap}; fi; "
    )
    scripts = (f"test -e {second} || exit 3", f"test -e {second} || sleep 3000")
    group = Group("sequel", tmp_path, scripts, before=look, pins={0: "host-a", 1: "host-b"})
    pool.start_server("--build-retry-backoff-secs", "0.2")
    for name in ("host-a", "host-b"):
        pool.start_worker(name, "--build-max-concurrent", "1", wait=False)
    pool.wait_connected("host-a", "host-b")
    submitted = group.submit(pool)
    submitted.wait_running(pool)
    (survivor,) = group.starts(1)
    assert pool.server is not None
    agent = pool.workers["host-b"].process
    agent.send(signal.SIGSTOP)
    try:
        group.go()
        wait_until("the verdict", lambda: submitted.show(pool)["status"] == "Queued")
        pool.server.end(signal.SIGKILL)
        pool.restart_server()
        pool.wait_connected("host-a")
        assert submitted.why(pool)["stage"] == "survivors"
        assert is_alive(survivor)
        assert len(group.starts(0)) == 1
        second.touch()
    finally:
        agent.send(signal.SIGCONT)
    ended = submitted.ended(pool)
    assert (ended["status"], ended["attempts"]) == ("Completed", 2), ended["tries"]
    assert ended["path"][0] == "member 0: the command ended with exit status 3; retry 1 of 1"
    assert [len(group.starts(number)) for number in (0, 1)] == [2, 2]
    assert not overlap.exists(), "the tries overlapped"
    assert not is_alive(survivor)
