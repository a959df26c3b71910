"""The claims of the scheduler on the real database: one transaction for each call."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import sqlalchemy as sa
import structlog
import trio
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import EvalStep, JobKind
from gradient_protocol.messages.shapes import Job

from gradient_server.clock import Clock
from gradient_server.db.errors import InDoubtError, database_errors, first_line
from gradient_server.db.queries import claims
from gradient_server.db.runner import Database
from gradient_server.domain.events import AssignmentClosed, Event, JobQueued
from gradient_server.domain.job import PendingJob, split_job_key
from gradient_server.domain.status import AbortReason
from gradient_server.graph import aborts
from gradient_server.graph.jobs import load_builds, load_job, load_pending
from gradient_server.graph.settings import GraphSettings
from gradient_server.scheduler.claims import ClaimRequest, ClaimsInDoubtError

__all__ = ["DatabaseClaimStore", "LoadBuilds", "LoadJob"]

log = structlog.get_logger(__name__)

_AFTER_FAILED_CLAIM_SECS = 1.0


class LoadJob(Protocol):
    """The wire's job of a claimed assignment, within the claim's transaction."""

    def __call__(
        self, connection: sa.Connection, job_key: str, *, steps: Sequence[EvalStep] | None = None
    ) -> Job:
        """LookupError if there is no such job."""
        ...


class LoadBuilds(Protocol):
    """The same for many builds, by their ids."""

    def __call__(self, connection: sa.Connection, builds: Sequence[str]) -> Mapping[str, Job]:
        """LookupError if one is missing."""
        ...


class DatabaseClaimStore:
    """The real one."""

    def __init__(
        self,
        database: Database,
        *,
        clock: Clock,
        ids: IdSource,
        instance_id: str,
        graph_settings: GraphSettings | None = None,
        load_job: LoadJob = load_job,
        load_builds: LoadBuilds = load_builds,
    ) -> None:
        self._database = database
        self._clock = clock
        self._ids = ids
        self._instance_id = instance_id
        self._graph_settings = graph_settings or GraphSettings()
        self._load_job = load_job
        self._load_builds = load_builds

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Job | None]:
        """All in one transaction, the wire's jobs loaded within it.

        None of them where the database is full or away: they are looked up again, as if another had won.
        ClaimsInDoubtError where its connection broke in mid-commit.
        """
        now = self._clock.now()

        def work(connection: sa.Connection) -> list[Job | None]:
            return self._claim(connection, requests, now)

        try:
            return await self._database.run(work)
        except InDoubtError as error:
            raise ClaimsInDoubtError(first_line(error)) from error
        except database_errors() as error:
            log.error("jobs cannot be claimed", count=len(requests), reason=first_line(error))
            # The next ones would fare no better at once.
            await trio.sleep(_AFTER_FAILED_CLAIM_SECS)
            return [None] * len(requests)

    async def accept(self, assignment_id: str, worker_id: str) -> bool:
        """The worker took the job."""
        now = self._clock.now()
        return await self._database.run(
            lambda connection: claims.accept_assignment(
                connection, assignment_id, worker_id, now=now, instance_id=self._instance_id
            )
        )

    async def reject(self, assignment_id: str, worker_id: str) -> list[Event]:
        """Closed as Rejected; the reason of an abort that was stored before goes first."""
        now = self._clock.now()

        def work(connection: sa.Connection) -> list[Event]:
            aborted = self._settle_aborted(connection, [assignment_id], now)
            if aborted:
                return aborted
            closed = claims.reject_assignment(
                connection, assignment_id, worker_id, now=now, instance_id=self._instance_id
            )
            return _requeued(connection, [] if closed is None else [closed], now)

        return await self._database.run(work)

    async def abandon(self, assignment_ids: Sequence[str]) -> list[Event]:
        """Closed as Abandoned, no attempt used."""
        now = self._clock.now()

        def work(connection: sa.Connection) -> list[Event]:
            events = self._settle_aborted(connection, assignment_ids, now)
            closed = [
                claims.close_abandoned(connection, assignment_id, now=now, instance_id=self._instance_id)
                for assignment_id in assignment_ids
            ]
            return events + _requeued(connection, [one for one in closed if one is not None], now)

        return await self._database.run(work)

    async def abort(self, assignment_id: str, reason: AbortReason, text: str) -> list[Event]:
        """Stores the abort; the events tell the worker's session."""
        now = self._clock.now()
        return await self._database.run(
            lambda connection: aborts.abort_assignments(
                connection, [assignment_id], reason, now=now, ids=self._ids, text=text
            )
        )

    async def reload(self, job_ids: Sequence[str]) -> list[PendingJob]:
        """Those of the jobs that wait."""
        now = self._clock.now()
        return await self._database.read(lambda connection: load_pending(connection, job_ids, now))

    def _claim(
        self, connection: sa.Connection, requests: Sequence[ClaimRequest], now: float
    ) -> list[Job | None]:
        wanted = [
            claims.Claim(
                assignment_id=request.assignment_id,
                job_key=request.job_id,
                worker_id=request.worker_id,
                instance_id=self._instance_id,
                missing_count=request.missing_count,
                missing_nar_size=request.missing_nar_size,
                dependency_count=request.dependency_count,
                score_breakdown=request.score_breakdown,
            )
            for request in requests
        ]
        claimed = claims.claim_assignments(connection, wanted, now=now)
        builds = [split_job_key(request.job_id) for request in requests if request.assignment_id in claimed]
        loaded = self._load_builds(connection, [job for kind, job in builds if kind is JobKind.BUILD])
        jobs: list[Job | None] = []
        for request in requests:
            if request.assignment_id not in claimed:
                jobs.append(None)
                continue
            build = loaded.get(split_job_key(request.job_id)[1])
            jobs.append(build or self._load_job(connection, request.job_id, steps=request.steps))
        return jobs

    def _settle_aborted(
        self, connection: sa.Connection, assignment_ids: Sequence[str], now: float
    ) -> list[Event]:
        # Whoever closes an assignment whose abort is stored has to end the job as its reason says.
        return aborts.reap_unconfirmed(
            connection, assignment_ids, now=now, ids=self._ids, settings=self._graph_settings
        )


def _requeued(
    connection: sa.Connection, closed: Sequence[claims.ClosedAssignment], now: float
) -> list[Event]:
    events: list[Event] = [
        AssignmentClosed(one.assignment_id, one.job_key, one.kind, one.worker_id) for one in closed
    ]
    waiting = [one.job_key for one in closed if one.requeued]
    if waiting:
        events.extend(JobQueued(job) for job in load_pending(connection, waiting, now))
    return events
