"""A build that counts its starts and its log, and what a fault may leave of it; what a fault cost."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.acceptance.pool import Pool
from tests.acceptance.processes import is_alive, wait_until
from tests.acceptance.trees import Build

__all__ = ["Cost", "Counting", "Under", "begin"]

COSTS_FILE = "GRADIENT_FAULTS_JSON"


@dataclass(frozen=True)
class Counting:
    """A build that notes each start of it, counts in its log until it is let go, and then succeeds."""

    name: str
    directory: Path
    before: str = ""
    more: dict[str, object] = field(default_factory=dict)

    @property
    def build(self) -> Build:
        """The recipe's entry."""
        script = (
            f"echo $$ >> {self.directory}/{self.name}.starts; {self.before} i=0; "
            f"until test -e {self.directory}/go; do echo $i; i=$((i+1)); sleep 0.1; done; "
            "echo end; echo done > $out"
        )
        return Build(self.name, script, more=self.more)

    @property
    def pids(self) -> list[int]:
        """The process of each start."""
        file = self.directory / f"{self.name}.starts"
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def starts(self) -> int:
        """How often it was started."""
        return len(self.pids)

    def go(self) -> None:
        """Lets it end."""
        (self.directory / "go").touch()

    def left(self) -> list[int]:
        """The starts of it that still run."""
        return [pid for pid in self.pids if is_alive(pid)]


@dataclass(frozen=True)
class Under:
    """An evaluation of one such build, which runs."""

    counting: Counting
    evaluation: str
    job: str

    def wait_for_log(self, pool: Pool, more_than: int) -> None:
        """Returns once the server has more than so many bytes of its log."""
        wait_until("a log that grows", lambda: pool.log_size(self.job) > more_than, secs=60)

    def attempts(self, pool: Pool) -> list[dict[str, Any]]:
        """Its tries, the first one first."""
        found: list[dict[str, Any]] = pool.get(f"/jobs/{self.job}")["attempts"]
        return found[::-1]

    def finish(self, pool: Pool) -> None:
        """Lets it end, and looks at what the fault left of it: it was started once, and its log is whole."""
        self.counting.go()
        view = pool.ended(self.evaluation)
        assert view["status"] == "Completed", view
        assert self.counting.starts() == 1, "it was started again"
        assert [attempt["outcome"] for attempt in self.attempts(pool)] == ["Completed"]
        lines = pool.log_bytes(self.job).decode().splitlines()
        assert lines == [*map(str, range(len(lines) - 1)), "end"], "its log has a gap"
        assert len(lines) > 10

    def finish_again(self, pool: Pool, lost: str) -> None:
        """Waits for a second start and lets it end. `lost`: what the first try is said to have ended by."""
        wait_until("a second start", lambda: self.counting.starts() == 2)
        self.counting.go()
        view = pool.ended(self.evaluation)
        assert view["status"] == "Completed", view
        first, second = self.attempts(pool)
        assert first["error"] == lost, first
        assert second["outcome"] == "Completed"
        assert self.counting.starts() == 2
        assert not self.counting.left(), "the first one still runs"


def begin(pool: Pool, counting: Counting) -> Under:
    """Submits such a build and waits until its log arrives."""
    evaluation = pool.submit(pool.tree(counting.build))
    build = pool.running(evaluation, counting.name)
    under = Under(counting, evaluation, f"build:{build['id']}")
    under.wait_for_log(pool, 10)
    return under


class Cost:
    """What a fault cost, for docs/faults.md (`tests/docs/faults_page.py`). One for each test."""

    def __init__(self, test: str) -> None:
        self._test = test
        self._fault = ""
        self._began = 0.0

    def begin(self, fault: str) -> None:
        """The fault happens now."""
        self._fault = fault
        self._began = time.monotonic()

    def useful(self, *, again: int = 0, without: float = 0.0) -> None:
        """The next useful step was taken: an assignment, a line of a log, an end.

        `again`: builds started again; `without`: seconds that the test itself let pass.
        """
        secs = time.monotonic() - self._began - without
        if file := os.environ.get(COSTS_FILE):
            entry = {"fault": self._fault, "again": again, "secs": round(secs, 1), "test": self._test}
            with Path(file).open("a") as lines:
                lines.write(json.dumps(entry) + "\n")
