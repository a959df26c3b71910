"""Clusters in one database, without a network: everything that may happen to them, and what must hold."""

from collections.abc import Sequence

import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import Compression, FailureKind
from gradient_protocol.messages.shapes import (
    BuildOutput,
    BuiltOutput,
    EvalResult,
    PathSource,
)
from gradient_protocol.messages.worker import JobCompleted, JobFailed, JobUpdate
from gradient_server.db.queries import uploads
from gradient_server.db.queries.cached_paths import CachedPath, forget_path, put_path
from gradient_server.db.queries.claims import Claim, accept_assignment, claim_assignment
from gradient_server.db.queries.clusters import ClusterClaim, claim_cluster, start_cluster_attempt
from gradient_server.domain.cluster import ClusterInfo, OpenMember
from gradient_server.domain.events import Event, JobQueued
from gradient_server.domain.job import eval_key
from gradient_server.graph.aborts import abort_evaluation, abort_job
from gradient_server.graph.cluster_load import load_clusters
from gradient_server.graph.jobs import load_job, load_pending
from gradient_server.graph.prepares import fail_prepare
from gradient_server.graph.reports import apply_report
from gradient_server.graph.retention import run_retention
from gradient_server.graph.settle import abort_cluster, settle_verdict
from gradient_server.graph.submit import submit_evaluation
from gradient_server.graph.sweeps import find_stuck

from tests.fixtures.graph import make_project, make_task, make_worker, store_path
from tests.fixtures.times import FakeClock
from tests.integration.graph.pool import hash_of, object_of
from tests.properties.clusters.never import NEVER
from tests.properties.clusters.shape import Shape

__all__ = ["Model"]

INSTANCE = "instance-1"
SOURCE = store_path("source")
KINDS = list(FailureKind)


class Model:
    """One transaction an event; `pick` chooses among what is there."""

    def __init__(self, connection: sa.Connection, shape: Shape) -> None:
        self.c = connection
        self.shape = shape
        self.clock = FakeClock()
        self.ids = IdSource.seeded(1, self.clock.now)
        self.project = make_project(connection)
        self.task = make_task(connection, self.project)
        self.workers = [make_worker(connection, f"w{number}") for number in range(shape.size)]
        self.evaluations: list[str] = []
        self.reported: list[tuple[str, str, int]] = []
        self.hold(SOURCE)
        self.submit(0)

    # Small things

    @property
    def now(self) -> float:
        return self.clock.now()

    def rows(self, text: str, **parameters: object) -> Sequence[sa.Row[tuple[object, ...]]]:
        return self.c.execute(sa.text(text), parameters).all()

    def clusters(self, status: str | None = None) -> list[ClusterInfo]:
        return [info for info in load_clusters(self.c, None) if status in (None, info.status)]

    def open_members(self, *, started: bool | None = None) -> list[tuple[str, OpenMember]]:
        return [
            (info.open_attempt.id, member)
            for info in self.clusters()
            if info.open_attempt is not None
            and (started is None or (info.open_attempt.started_at is not None) == started)
            for member in info.open_attempt.members
        ]

    def hold(self, path: str) -> None:
        stored = CachedPath(
            path=path,
            nar_hash=hash_of(path),
            nar_size=100,
            file_size=50,
            compression=Compression.ZSTD,
            object=object_of(path),
            references=(),
        )
        put_path(self.c, stored, now=self.now)

    def check_events(self, events: Sequence[Event]) -> None:
        """A job that is told of as queued is told with its cluster."""
        for event in events:
            if isinstance(event, JobQueued):
                found = self.rows(
                    "SELECT m.cluster_job FROM cluster_member m WHERE 'build:' || m.derivation_build = :key",
                    key=event.job.job_id,
                )
                assert event.job.cluster == (found[0][0] if found else None)

    # Events

    def submit(self, _pick: int) -> None:
        if len(self.evaluations) >= 4:
            return
        evaluation, _ = submit_evaluation(
            self.c,
            project=self.project,
            task=self.task,
            source=PathSource(path=SOURCE),
            source_path=None,
            attrs=[],
            prioritized=False,
            build_request=True,
            now=self.now,
            ids=self.ids,
        )
        self.evaluations.append(evaluation)
        assignment = self.claim_single(eval_key(evaluation))
        batch = EvalResult(
            derivations=self.shape.tree(), clusters=[self.shape.cluster()], warnings=[], errors=[]
        )
        self.report(JobUpdate(assignment_id=assignment, seq=1, update=batch), self.workers[0])
        done = JobCompleted(assignment_id=assignment, seq=2, spans=[], spans_dropped=0)
        self.report(done, self.workers[0])

    def claim_single(self, key: str) -> str:
        assignment = self.ids.new()
        worker = self.workers[0]
        claim = Claim(assignment_id=assignment, job_key=key, worker_id=worker, instance_id=INSTANCE)
        assert claim_assignment(self.c, claim, now=self.now)
        assert accept_assignment(self.c, assignment, worker, now=self.now)
        return assignment

    def report(self, message: JobUpdate | JobCompleted | JobFailed, worker: str) -> None:
        outcome = apply_report(
            self.c, worker_id=worker, instance_id=INSTANCE, message=message, now=self.now, ids=self.ids
        )
        assert outcome.refused is None, outcome.refused
        assert outcome.error is None, outcome.error
        self.check_events(outcome.events)

    def finish_single(self, pick: int, *, fail: bool = False) -> None:
        """A job that is no member runs to its end."""
        waiting = [
            job
            for job in load_pending(self.c, None, self.now)
            if job.cluster is None and (job.not_before or 0) <= self.now
        ]
        if not waiting:
            return
        key = waiting[pick % len(waiting)].job_id
        assignment = self.claim_single(key)
        if fail:
            self.report(failed(assignment, 1, KINDS[pick % len(KINDS)]), self.workers[0])
            return
        self.made(assignment, key, self.workers[0], member=False)
        done = JobCompleted(assignment_id=assignment, seq=2, spans=[], spans_dropped=0)
        self.report(done, self.workers[0])

    def made(self, assignment: str, key: str, worker: str, *, member: bool) -> None:
        job = load_job(self.c, key)
        outputs = [
            BuiltOutput(
                name=output.name,
                path=output.path,
                nar_hash=hash_of(output.path),
                nar_size=100,
                references=[],
                contains_store_dir=False,
            )
            for output in job.outputs  # type: ignore[union-attr]  # it is a build
        ]
        update = BuildOutput(outputs=outputs, products=[], metrics=None, substituted=False)
        self.report(JobUpdate(assignment_id=assignment, seq=1, update=update), worker)
        for output in outputs:
            if member:
                self.upload(assignment, output.path)
            else:
                self.hold(output.path)

    def upload(self, assignment: str, path: str) -> None:
        request = self.ids.new()
        uploads.start_upload(
            self.c,
            request=request,
            worker="w",
            assignment=assignment,
            path=path,
            lease_until=self.now + 300,
            now=self.now,
        )
        uploads.finish_upload(
            self.c,
            request,
            nar_hash=hash_of(path),
            nar_size=100,
            object_name=object_of(request),
            file_size=50,
            compression="zstd",
        )

    def fail_single(self, pick: int) -> None:
        self.finish_single(pick, fail=True)

    def claim(self, pick: int) -> None:
        """With or without the acceptances of all members."""
        for info in self.clusters("Queued"):
            attempt = self.ids.new()
            members = [
                Claim(
                    assignment_id=self.ids.new(),
                    job_key=member.job_key,
                    worker_id=worker,
                    instance_id=INSTANCE,
                    cluster_attempt=attempt,
                    cluster_role=member.role,
                    cluster_index=member.index,
                )
                for member, worker in zip(info.members, self.workers, strict=True)
            ]
            claim = ClusterClaim(
                attempt_id=attempt, cluster_id=info.id, instance_id=INSTANCE, members=members
            )
            if claim_cluster(self.c, claim, now=self.now):
                assert info.open_attempt is None
                for member in members[pick % 2 :]:
                    accept_assignment(self.c, member.assignment_id, member.worker_id, now=self.now)

    def claim_member_alone(self, pick: int) -> None:
        """Whatever state its cluster is in, a member is nobody's single job."""
        for info in self.clusters():
            claim = Claim(
                assignment_id=self.ids.new(),
                job_key=info.members[pick % len(info.members)].job_key,
                worker_id=self.workers[0],
                instance_id=INSTANCE,
            )
            assert not claim_assignment(self.c, claim, now=self.now)

    def failed_try(self, pick: int) -> None:
        """A whole try, from its claim to a verdict over a failure."""
        self.claim(0)
        self.start(0)
        self.member_fails(pick)
        self.settle(1)

    def start(self, _pick: int) -> None:
        for info in self.clusters("Queued"):
            if info.open_attempt is not None:
                start_cluster_attempt(self.c, info.open_attempt.id, INSTANCE, now=self.now)

    def fail_prepare(self, _pick: int) -> None:
        for attempt in {attempt for attempt, _ in self.open_members()}:
            _, events = fail_prepare(self.c, attempt, "late", now=self.now, instance_id=INSTANCE)
            self.check_events(events)

    def member_reports(self, pick: int, *, succeed: bool) -> None:
        members = [(a, m) for a, m in self.open_members() if not m.report_stored]
        if not members:
            return
        _, member = members[pick % len(members)]
        assignment, worker = member.assignment_id, member.worker_id
        if succeed:
            self.made(assignment, member.job_key, worker, member=True)
            self.report(JobCompleted(assignment_id=assignment, seq=2, spans=[], spans_dropped=0), worker)
            self.reported.append((assignment, worker, 2))
        else:
            missing = [store_path("base-out")] if pick % 3 else []
            self.report(failed(assignment, 1, KINDS[pick % len(KINDS)], missing), worker)
            self.reported.append((assignment, worker, 1))

    def member_succeeds(self, pick: int) -> None:
        self.member_reports(pick, succeed=True)

    def member_fails(self, pick: int) -> None:
        self.member_reports(pick, succeed=False)

    def late_report(self, pick: int) -> None:
        """What was acknowledged, or belongs to an attempt that is over, comes (again)."""
        if self.reported:
            assignment, worker, seq = self.reported[pick % len(self.reported)]
            self.report(failed(assignment, seq, FailureKind.PERMANENT), worker)

    def settle(self, pick: int) -> None:
        """Now and then with a loss."""
        for attempt in {attempt for attempt, _ in self.open_members()}:
            own = [m.assignment_id for a, m in self.open_members() if a == attempt]
            lost = {own[pick % len(own)]: "gone"} if pick % 4 == 0 else {}
            settlement = settle_verdict(
                self.c, attempt, instance_id=INSTANCE, now=self.now, ids=self.ids, lost=lost
            )
            if settlement is not None:
                self.check_events(settlement.events)
                repeated = settle_verdict(
                    self.c, attempt, instance_id=INSTANCE, now=self.now, ids=self.ids, lost=lost
                )
                assert repeated is None

    def abort_evaluation(self, pick: int) -> None:
        chosen = self.evaluations[pick % len(self.evaluations)]
        self.check_events(abort_evaluation(self.c, chosen, now=self.now, ids=self.ids) or [])

    def abort_member(self, pick: int) -> None:
        for info in self.clusters()[:1]:
            key = info.members[pick % len(info.members)].job_key
            self.check_events(abort_job(self.c, key, now=self.now, ids=self.ids) or [])

    def abort_cluster(self, _pick: int) -> None:
        for info in self.clusters()[:1]:
            events = abort_cluster(self.c, info.id, now=self.now, ids=self.ids)
            assert events is not None
            self.check_events(events)

    def lose_path(self, pick: int) -> None:
        names = ["base", *self.shape.names]
        forget_path(self.c, store_path(f"{names[pick % len(names)]}-out"))

    def wait(self, pick: int) -> None:
        self.clock.advance(float(10 ** (pick % 4)))

    def retention(self, _pick: int) -> None:
        active = {info.id for info in self.clusters()}
        run_retention(self.c, retention_days=0.001, now=self.now)
        assert active == {info.id for info in self.clusters()}

    # What holds after each

    def check(self) -> None:
        for rule, query in NEVER.items():
            assert not self.rows(query), rule
        stuck = find_stuck(self.c)
        assert not len(stuck), f"the watchdog would repair {stuck}"

    def run_to_the_end(self) -> None:
        """With faults over, everything ends."""
        for _ in range(200):
            if not self.clusters() and not load_pending(self.c, None, self.now):
                break
            self.clock.advance(10_000)
            for _ in range(3):
                self.finish_single(0)
            for attempt, _ in self.open_members(started=False):
                fail_prepare(self.c, attempt, "over", now=self.now, instance_id=INSTANCE)
            self.claim(0)
            self.start(0)
            for _ in range(self.shape.size):
                self.member_succeeds(0)
            self.settle(1)
            self.check()
        unfinished = self.rows("SELECT id, status FROM evaluation WHERE finished_at IS NULL")
        assert not unfinished
        assert not self.clusters()
        assert not self.rows("SELECT id FROM dispatched_job WHERE finished_at IS NULL")
        assert not self.rows("SELECT id FROM derivation_build WHERE finished_at IS NULL")


def failed(assignment: str, seq: int, kind: FailureKind, missing: Sequence[str] = ()) -> JobFailed:
    """A failure of that kind."""
    return JobFailed(
        assignment_id=assignment,
        seq=seq,
        kind=kind,
        error=f"it ended {kind}",
        missing_paths=list(missing),
        spans=[],
        spans_dropped=0,
    )
