"""Several servers on one PostgreSQL, and a `Watcher` that looks at the database from outside."""

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx2
import psycopg

from tests.acceptance.pool import Started
from tests.acceptance.processes import READY_SECS, free_port, program, wait_until

__all__ = ["Servers", "Watcher"]

Json = dict[str, Any]

POLL_SECS = 0.05
LOG_BYTES = 6000


class Servers:
    """`gradient-server` processes on one database; ends them, and removes their directories, on leaving."""

    def __init__(self, database_url: str, count: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="gradient-instances-"))
        self.database_url = database_url
        self.count = count
        self.ports = [free_port() for _ in range(count)]
        self.addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(count)]
        self.processes: list[Started] = []
        self._stack = ExitStack()
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            # One after another: the first migrates.
            for number in range(self.count):
                self._start(number)
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self, number: int) -> None:
        log = self.directory / f"server-{number}.log"
        flags = [
            "--base-dir", str(self.directory / str(number)), "--port", str(self.ports[number]),
            "--proto-listen", self.addresses[number], "--proto-advertise-url", self.addresses[number],
            "--database-url", self.database_url, "--scheduler-scoring-policy", "simple",
        ]  # fmt: skip
        started = Started([program("gradient-server"), "serve", *flags], log)
        self._stack.callback(self._end, started)
        self.processes.append(started)

        def listens() -> bool:
            assert started.code is None, self.logs()
            return b"\nhttp: " in b"\n" + log.read_bytes()

        wait_until(f"server {number} listens", listens)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @staticmethod
    def _end(process: Started) -> None:
        process.send(signal.SIGKILL)
        process.wait(READY_SECS)

    def instance(self, number: int) -> str:
        """The id of this server."""
        return (self.directory / str(number) / "instance_id").read_text().strip()

    def post(self, number: int, path: str, body: Json) -> Json:
        """By this server."""
        key = (self.directory / "0/api-key").read_text().strip()
        url = f"http://127.0.0.1:{self.ports[number]}/api/v1{path}"
        answer = httpx2.post(
            url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60.0, trust_env=False
        )
        assert answer.is_success, answer.text
        content: Json = answer.json()
        return content

    def get(self, number: int, path: str) -> Json:
        """By this server."""
        url = f"http://127.0.0.1:{self.ports[number]}/api/v1{path}"
        content: Json = httpx2.get(url, timeout=60.0, trust_env=False).json()
        return content

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(
            f"--- {log.name}\n{log.read_bytes()[-LOG_BYTES:].decode(errors='replace')}"
            for log in sorted(self.directory.glob("*.log"))
        )


class Watcher:
    """A thread that looks at the database; `problems` is what must not be."""

    ATTEMPTS = (
        "SELECT cluster_job, count(*) FROM cluster_attempt WHERE finished_at IS NULL"
        " GROUP BY cluster_job HAVING count(*) > 1"
    )
    ALONE = (
        "SELECT d.job_key FROM dispatched_job d JOIN cluster_member m"
        " ON d.job_key = 'build:' || m.derivation_build WHERE d.cluster_attempt IS NULL"
    )
    PARTIAL = (
        "SELECT t.id FROM cluster_attempt t WHERE t.started_at IS NOT NULL AND t.finished_at IS NULL AND"
        " (SELECT count(*) FROM dispatched_job d WHERE d.cluster_attempt = t.id AND d.finished_at IS NULL"
        " AND d.status = 'Accepted')"
        " <> (SELECT count(*) FROM cluster_member m WHERE m.cluster_job = t.cluster_job)"
    )

    def __init__(self, database_url: str) -> None:
        self._conninfo = database_url.replace("postgresql+psycopg://", "postgresql://")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher")
        self.problems: list[str] = []
        self.looks = 0
        self.most_open = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def rows(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        """What a query finds now, in a connection of its own."""
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            return connection.execute(query.encode(), parameters).fetchall()

    def _watch(self) -> None:
        try:
            with psycopg.connect(self._conninfo, autocommit=True) as connection:
                while not self._stop.wait(POLL_SECS):
                    self._look(connection)
        except psycopg.Error as error:
            self.problems.append(f"the watcher ended: {error}")

    def _look(self, connection: psycopg.Connection) -> None:
        self.looks += 1
        for name, query in (("two open", self.ATTEMPTS), ("alone", self.ALONE), ("partial", self.PARTIAL)):
            found = connection.execute(query.encode()).fetchall()
            if found:
                self.problems.append(f"{name}: {found}")
        row = connection.execute(b"SELECT count(*) FROM cluster_attempt WHERE finished_at IS NULL").fetchone()
        assert row is not None
        self.most_open = max(self.most_open, row[0])

    def standings(self) -> dict[str, int]:
        """Clusters by status."""
        return dict(self.rows("SELECT status, count(*) FROM cluster_job GROUP BY status"))

    def faults(self, heard: dict[str, float]) -> Iterator[str]:
        """What the history says against it, once all has ended."""
        overlap = (
            "SELECT a.id, b.id FROM cluster_attempt a JOIN cluster_attempt b ON a.cluster_job = b.cluster_job"
            " AND a.id < b.id AND a.created_at < b.finished_at AND b.created_at < a.finished_at"
        )
        for row in self.rows(overlap):
            yield f"attempts that overlap: {row}"
        succeeded = (
            "SELECT c.id FROM cluster_job c WHERE (SELECT count(*) FROM cluster_attempt t"
            " WHERE t.cluster_job = c.id AND t.outcome = 'Succeeded') <> 1"
        )
        for row in self.rows(succeeded):
            yield f"not one try succeeded: {row}"
        members = (
            "SELECT d.id, t.started_at, t.outcome FROM dispatched_job d"
            " JOIN cluster_attempt t ON t.id = d.cluster_attempt"
        )
        for assignment, started_at, outcome in self.rows(members):
            at = heard.get(assignment)
            if at is not None and (started_at is None or at < started_at):
                yield f"{assignment} was told to start before its attempt had"
            if at is None and outcome == "Succeeded":
                yield f"{assignment} of a try that succeeded never heard its start"
