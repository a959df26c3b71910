"""`gradient demo`: succeeds, and leaves nothing behind."""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.acceptance.processes import clean_environment, program


def processes_in(directory: Path) -> list[psutil.Process]:
    """Processes whose command line names something in `directory`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        arguments = process.info["cmdline"] or []
        named = any(str(directory) in argument for argument in arguments)
        if named and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Not pytest's own, whose path is too long for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="gradient-") as directory:
        yield Path(directory)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_demo_succeeds_and_leaves_no_process_behind(temporary: Path) -> None:
    done = subprocess.run(
        [program("gradient"), "demo"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=clean_environment({"TMPDIR": str(temporary)}),
    )
    try:
        assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
        assert "0 builds started" in done.stdout
        assert "all of it succeeded" in done.stdout
        deadline = time.monotonic() + 5
        while processes_in(temporary) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_in(temporary) == []
        assert list(temporary.iterdir()) == []
    finally:
        for process in processes_in(temporary):
            process.kill()
