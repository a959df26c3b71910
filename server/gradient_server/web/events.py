"""What happens to one evaluation, as server-sent events (`gradient build` shows it).

First a `snapshot`, then what changes: `build`, `stage`, `evaluating`, `note`, `log`; at last
`evaluation` with a final status, and the end. A reader that lags behind gets a fresh `snapshot` for
what it has missed.
Logs and stages are looked at a few times a second, and only where somebody watches.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import msgspec
import sqlalchemy as sa
import structlog
import trio

from gradient_server.db.tables import evaluation
from gradient_server.domain.events import BuildChanged, EvaluationChanged, LogGrew, NoteAdded
from gradient_server.domain.job import build_key, eval_key
from gradient_server.domain.status import BuildStatus, EvaluationStatus
from gradient_server.graph.views import EvaluationView, evaluation_view
from gradient_server.net.services import Services
from gradient_server.scheduler.model import Assignment
from gradient_server.storage.durable import StorageError
from gradient_server.web.evaluation_views import evaluation_json
from gradient_server.web.hub import Hub, Watcher, WatchEvent
from gradient_server.web.live import Live, live_of_assignment
from gradient_server.web.log_lines import last_line
from gradient_server.web.running import Running

__all__ = ["event_stream", "sse"]

log = structlog.get_logger(__name__)

# How often logs and stages are looked at: at most 4 lines a second for each job.
LOOK_EVERY_SECS: Final = 0.25
# How long an unchanged stream is silent before a comment keeps it alive, and the state is compared.
KEEP_ALIVE_SECS: Final = 15.0
# A reader that lags behind gets snapshots this far apart.
SNAPSHOT_EVERY_SECS: Final = 1.0
# Logs looked at together.
LOGS_AT_ONCE: Final = 8
TAIL_BYTES: Final = 8 * 1024
NOTES_REMEMBERED: Final = 2_000

Json = dict[str, Any]


def sse(name: str, data: Json) -> bytes:
    """One event on the wire."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))


async def event_stream(services: Services, hub: Hub, evaluation_id: str) -> AsyncGenerator[bytes, None]:
    """Ends after the final `evaluation` event, or when the server stops."""
    with hub.watch(evaluation_id) as watcher:
        async with aclosing(_Stream(services, watcher).run()) as chunks:
            async for chunk in chunks:
                yield chunk


class _Stream:
    """One reader's stream."""

    def __init__(self, services: Services, watcher: Watcher) -> None:
        self._services = services
        self._watcher = watcher
        self._running = Running()
        self._notes: set[tuple[str, str | None, str]] = set()
        self._is_final = False

    async def run(self) -> AsyncGenerator[bytes, None]:
        """The chunks of the answer."""
        while not self._is_final and not self._services.draining.is_set():
            view = await self._view()
            if view is None:  # an evaluation that was deleted while somebody looked
                return
            yield await self._snapshot(view)
            summary = view.summary
            if EvaluationStatus(summary.status).is_final:
                yield sse("evaluation", {"status": summary.status, "error": summary.error})
                return
            async with aclosing(self._changes()) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _view(self) -> EvaluationView | None:
        wanted = self._watcher.evaluation
        # From here on events count; some of them may be older than what is read now, none is missed.
        self._watcher.found()
        return await self._services.database.read(lambda connection: evaluation_view(connection, wanted))

    async def _snapshot(self, view: EvaluationView) -> bytes:
        self._running = Running()
        self._notes = {(note.level, note.source, note.message) for note in view.notes}
        for build in view.builds:
            key = build_key(build.id)
            self._watcher.note_job(key, build.name, ended=BuildStatus(build.status).is_final)
            self._running.attrs[key] = build.attr
            if build.status == BuildStatus.ASSIGNED:
                self._told(key)
        self._told(eval_key(self._watcher.evaluation))
        answer = await evaluation_json(view, self._services, outputs=False)
        return b"event: snapshot\ndata: %s\n\n" % answer

    def _told(self, job_key: str) -> None:
        """The snapshot says how far the job is."""
        assignment = self._services.scheduler.pool.by_job.get(job_key)
        if assignment is not None:
            self._running.told(job_key, assignment, self._live(assignment))

    def _live(self, assignment: Assignment) -> Live:
        return live_of_assignment(self._services, assignment)

    async def _changes(self) -> AsyncGenerator[bytes, None]:
        """Events until the last, or until a fresh snapshot is needed."""
        watcher, clock = self._watcher, self._services.clock
        began = told_at = looked_at = clock.monotonic()
        while not self._services.draining.is_set():
            await watcher.wait(LOOK_EVERY_SECS)
            told = [
                self._event(event)
                for event in watcher.take()
                if not self._is_final and not self._is_known(event)
            ]
            # Not at every event, for there may be thousands a second.
            if clock.monotonic() - looked_at >= LOOK_EVERY_SECS and not self._is_final:
                looked_at = clock.monotonic()
                looked = self._running.look(watcher.jobs, self._services.scheduler.pool.by_job, self._live)
                told += [sse(name, data) for name, data in looked]
                told += await self._new_lines()
            if told:
                yield b"".join(told)
                told_at = clock.monotonic()
            if self._is_final:
                return
            if watcher.lost:
                await trio.sleep(max(0.0, began + SNAPSHOT_EVERY_SECS - clock.monotonic()))
                return
            if clock.monotonic() - told_at >= KEEP_ALIVE_SECS:
                if await self._has_ended():
                    return
                yield b": still here\n\n"
                told_at = clock.monotonic()

    def _is_known(self, event: WatchEvent) -> bool:
        """Whether the reader has this note: workers show notes at once, and store them with their batch."""
        if not isinstance(event, NoteAdded):
            return False
        note = (event.level, event.source, event.message)
        if note in self._notes:
            return True
        if len(self._notes) >= NOTES_REMEMBERED:
            self._notes.clear()
        self._notes.add(note)
        return False

    def _event(self, event: WatchEvent) -> bytes:
        if isinstance(event, BuildChanged):
            key = build_key(event.build)
            self._watcher.note_job(key, event.name, ended=BuildStatus(event.status).is_final)
            self._running.changed(key, event)
            worker = event.worker
            assignment = self._services.scheduler.pool.by_job.get(key)
            if event.status == BuildStatus.ASSIGNED and assignment is not None:
                # Whoever joins a build that runs already does not know where.
                worker = assignment.worker_name
                self._running.told(key, assignment, Live())
            return sse(
                "build",
                {
                    "id": event.build,
                    "name": event.name,
                    "attr": self._running.attrs.get(key),
                    "status": event.status,
                    "worker": worker,
                    "error": event.error,
                },
            )
        if isinstance(event, NoteAdded):
            return sse("note", {"level": event.level, "source": event.source, "message": event.message})
        assert isinstance(event, EvaluationChanged)
        self._is_final = EvaluationStatus(event.status).is_final
        return sse("evaluation", {"status": event.status, "error": event.error})

    async def _new_lines(self) -> list[bytes]:
        watcher = self._watcher
        if not watcher.grown:
            return []
        grown = [watcher.grown.pop(job_key) for job_key in list(watcher.grown)[:LOGS_AT_ONCE]]
        lines = await trio.to_thread.run_sync(self._read_lines, grown, limiter=self._services.log_threads)
        return [
            sse("log", {"job": job_key, "name": watcher.jobs[job_key], "line": line})
            for job_key, line in lines.items()
            if job_key in watcher.jobs
        ]

    def _read_lines(self, grown: list[LogGrew]) -> dict[str, str]:
        """The last complete line of each, by job key."""
        found: dict[str, str] = {}
        for event in grown:
            begin = max(0, event.log_bytes - TAIL_BYTES)
            try:
                tail = self._services.logs.read(event.assignment_id, begin, TAIL_BYTES)
            except StorageError as error:
                # The log is for people to look at; the build goes on.
                log.warning("a log cannot be shown", assignment=event.assignment_id, reason=str(error))
                continue
            line = last_line(tail)
            if line is not None:
                found[event.job_id] = line
        return found

    async def _has_ended(self) -> bool:
        """Whether it ended without a word here: another instance may have taken it over."""
        query = sa.select(evaluation.c.status).where(evaluation.c.id == self._watcher.evaluation)
        status = await self._services.database.read(lambda connection: connection.scalar(query))
        return status is None or EvaluationStatus(status).is_final
