"""The database's part of cluster jobs, in memory: one instance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradient_protocol.messages.shapes import Job
from gradient_server.cluster.settings import SURVIVORS_SECS
from gradient_server.cluster.store import MemberClaim
from gradient_server.cluster.verdict import MemberReport, MemberState, Verdict, decide
from gradient_server.db.queries.signals import StoredSignal
from gradient_server.domain.cluster import ClusterInfo, OpenAttempt, OpenMember, StoppingAttempt
from gradient_server.domain.events import (
    AssignmentClosed,
    ClusterChanged,
    ClusterQueued,
    Event,
    JobQueued,
    MemberReported,
)
from gradient_server.domain.job import PendingJob
from gradient_server.domain.status import AttemptOutcome, ClusterStatus

from tests.fakes.scheduler import START, FakeClaimStore, SteppedClock, wire_job

__all__ = ["FakeClusterStore"]


@dataclass
class FakeAttempt:
    """A row with its members'."""

    id: str
    cluster_id: str
    claims: Sequence[MemberClaim]
    started: bool = False
    outcome: AttemptOutcome | None = None
    reports: dict[str, MemberState] = field(default_factory=dict)
    closed_at: float | None = None
    survivors_until: float | None = None


class FakeClusterStore:
    """The database's part, one instance. `before` runs within the hop of each transaction."""

    instance_id = "instance-1"
    is_shared = True

    def __init__(self, jobs: FakeClaimStore, clock: SteppedClock) -> None:
        self._jobs = jobs
        self._clock = clock
        self.clusters: dict[str, ClusterInfo] = {}
        self.pending: dict[str, PendingJob] = {}
        self.attempts: dict[str, FakeAttempt] = {}
        self.before: Callable[[str], None] = lambda _: None
        self.reserved: tuple[str, dict[str, str]] | None = None
        self.deny_reservation = False
        self.signals: list[StoredSignal] = []

    def open_attempts(self, cluster_id: str) -> list[FakeAttempt]:
        """At most one, or a test has failed."""
        return [a for a in self.attempts.values() if a.cluster_id == cluster_id and a.outcome is None]

    async def load(self, cluster_ids: Sequence[str] | None) -> list[ClusterInfo]:
        """As they are; None: those that have not ended."""
        wanted = [
            info
            for key, info in self.clusters.items()
            if (not info.status.is_final if cluster_ids is None else key in cluster_ids)
        ]
        return [self._with_attempts(info) for info in wanted]

    def _with_attempts(self, info: ClusterInfo) -> ClusterInfo:
        last = next((a for a in reversed(self.attempts.values()) if a.cluster_id == info.id), None)
        if last is None:
            return info
        members = tuple(
            OpenMember(
                assignment_id=one.assignment_id,
                job_key=one.member.job_key,
                worker_id=one.worker_id,
                accepted=last.started,
                report_stored=one.assignment_id in last.reports,
            )
            for one in last.claims
        )
        if last.outcome is None:
            started_at = START if last.started else None
            found = OpenAttempt(
                id=last.id,
                instance_id=self.instance_id,
                created_at=START,
                started_at=started_at,
                members=members,
            )
            return replace(info, open_attempt=found)
        if last.survivors_until is None:
            return info
        stopping = StoppingAttempt(
            id=last.id, instance_id=self.instance_id, until=last.survivors_until, members=members
        )
        return replace(info, stopping_attempt=stopping)

    async def worker_names(self, worker_ids: Sequence[str]) -> dict[str, str]:
        """As the fake workers are called."""
        return {worker: f"host-{worker}" for worker in worker_ids}

    async def claim(
        self, attempt_id: str, cluster_id: str, members: Sequence[MemberClaim]
    ) -> list[Job] | None:
        """All or nothing."""
        self.before("claim")
        keys = [one.member.job_key for one in members]
        if self.clusters[cluster_id].status is not ClusterStatus.QUEUED or self.open_attempts(cluster_id):
            return None
        if any(key not in self._jobs.queued for key in keys):
            return None
        for key in keys:
            self.pending[key] = self._jobs.queued.pop(key)
        self.attempts[attempt_id] = FakeAttempt(attempt_id, cluster_id, members)
        return [wire_job(self.pending[key], None) for key in keys]

    async def start(self, attempt_id: str, seats: Sequence[tuple[str, str]]) -> bool:
        """Only an open attempt without reports."""
        self.before("start")
        attempt = self.attempts[attempt_id]
        if attempt.outcome is not None or attempt.reports or len(seats) != len(attempt.claims):
            return False
        attempt.started = True
        info = self.clusters[attempt.cluster_id]
        self.clusters[info.id] = replace(info, status=ClusterStatus.RUNNING, attempts=info.attempts + 1)
        return True

    async def fail_prepare(self, attempt_id: str, reason: str) -> list[Event]:
        """Only an open attempt that was not started."""
        self.before("fail")
        attempt = self.attempts[attempt_id]
        if attempt.outcome is not None or attempt.started:
            return []
        return self._close(attempt, AttemptOutcome.PREPARE_FAILED, requeue=True)

    async def settle(self, attempt_id: str, lost: Mapping[str, str]) -> tuple[Verdict | None, list[Event]]:
        """By the real `decide`."""
        self.before("settle")
        attempt = self.attempts[attempt_id]
        if attempt.outcome is not None or not attempt.started:
            return None, []
        for assignment in lost:
            attempt.reports.setdefault(assignment, MemberState.LOST)
        info = self.clusters[attempt.cluster_id]
        by_id = {one.assignment_id: one.member for one in attempt.claims}
        states = {**attempt.reports, **{a: MemberState.RUNNING for a in by_id if a not in attempt.reports}}
        reports = [
            MemberReport(role=by_id[a].role, index=by_id[a].index, primary=by_id[a].primary, state=state)
            for a, state in states.items()
        ]
        verdict = decide(
            reports, attempts=info.attempts, retry_budget=info.retry_budget, evaluation_aborted=False
        )
        if verdict is None:
            return None, []
        return verdict, self._settled(attempt, verdict)

    def _settled(self, attempt: FakeAttempt, verdict: Verdict) -> list[Event]:
        if verdict is Verdict.RETRY:
            info = replace(self.clusters[attempt.cluster_id], status=ClusterStatus.QUEUED)
            self.clusters[info.id] = info
            events = self._close(attempt, AttemptOutcome.FAILED, requeue=True)
            if len(attempt.reports) < len(attempt.claims):
                attempt.survivors_until = self._clock.now() + SURVIVORS_SECS
            return [ClusterChanged(info.id, info.status), ClusterQueued(info), *events]
        done = verdict is Verdict.COMPLETE
        outcome = AttemptOutcome.SUCCEEDED if done else AttemptOutcome.FAILED
        events = self._close(attempt, outcome, requeue=False)
        return [
            *events,
            self._end(attempt.cluster_id, ClusterStatus.COMPLETED if done else ClusterStatus.FAILED),
        ]

    def _end(self, cluster_id: str, status: ClusterStatus) -> Event:
        self.clusters[cluster_id] = replace(self.clusters[cluster_id], status=status)
        return ClusterChanged(cluster_id, status)

    def _close(self, attempt: FakeAttempt, outcome: AttemptOutcome, *, requeue: bool) -> list[Event]:
        assert attempt.outcome is None, "an attempt has one outcome"
        attempt.outcome = outcome
        attempt.closed_at = self._clock.monotonic()
        events: list[Event] = []
        for one in attempt.claims:
            job = self.pending[one.member.job_key]
            events.append(AssignmentClosed(one.assignment_id, job.job_id, job.kind, one.worker_id))
            if requeue:
                self._jobs.queued[job.job_id] = job
        if requeue:
            events += [JobQueued(self.pending[one.member.job_key]) for one in attempt.claims]
        return events

    def abort(self, cluster_id: str) -> list[Event]:
        """A person aborts the cluster: its open attempt is closed in the same transaction."""
        events: list[Event] = []
        for attempt in self.open_attempts(cluster_id):
            events += self._close(attempt, AttemptOutcome.ABORTED, requeue=False)
        return [*events, self._end(cluster_id, ClusterStatus.ABORTED)]

    def revive(self, cluster_id: str) -> list[Event]:
        """A completed cluster is wanted again: Queued, with new builds for all members but the first."""
        info = self.clusters[cluster_id]
        assert info.status is ClusterStatus.COMPLETED
        jobs = [self.pending[member.job_key] for member in info.members]
        jobs = [jobs[0], *(replace(job, job_id=f"{job.job_id}+") for job in jobs[1:])]
        self._jobs.queued.update({job.job_id: job for job in jobs})
        members = tuple(
            replace(member, job_key=job.job_id) for member, job in zip(info.members, jobs, strict=True)
        )
        again = replace(info, status=ClusterStatus.QUEUED, attempts=0, members=members)
        self.clusters[cluster_id] = again
        queued: list[Event] = [JobQueued(job) for job in jobs]
        return [ClusterChanged(cluster_id, again.status), ClusterQueued(again), *queued]

    def report(self, assignment_id: str, state: MemberState) -> list[Event]:
        """A final report arrives and is held, or comes too late."""
        for attempt in self.attempts.values():
            if any(one.assignment_id == assignment_id for one in attempt.claims):
                if attempt.outcome is None:
                    attempt.reports.setdefault(assignment_id, state)
                return [MemberReported(attempt.id, assignment_id)]
        return []

    async def survivors_ended(self, attempt_id: str) -> None:
        """The cluster may be tried again anywhere."""
        self.attempts[attempt_id].survivors_until = None

    async def signals_after(
        self, attempt_id: str, n: int, role: str, index: int, *, limit: int
    ) -> list[StoredSignal]:
        """To all but the sender."""
        del attempt_id
        found = [s for s in self.signals if s.n > n and (s.sender_role, s.sender_index) != (role, index)]
        return found[:limit]

    async def reserve(self, cluster_id: str, seats: Mapping[str, str], reserved_at: float) -> bool:
        """One in the pool."""
        del reserved_at
        if self.deny_reservation or (self.reserved is not None and self.reserved[0] != cluster_id):
            return False
        self.reserved = (cluster_id, dict(seats))
        return True

    async def release_reservation(self, cluster_id: str) -> None:
        """Gives it back."""
        if self.reserved is not None and self.reserved[0] == cluster_id:
            self.reserved = None

    async def clear_reservation(self) -> None:
        """At the start."""
        self.reserved = None
