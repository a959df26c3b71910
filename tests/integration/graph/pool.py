"""A pool without a network: what sessions and the scheduler would do to the graph, one call each."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import Compression, EvalStep, FailureKind
from gradient_protocol.messages.shapes import (
    BuildOutput,
    BuiltOutput,
    Cluster,
    Derivation,
    DerivationInput,
    DerivationOutput,
    EvalResult,
    Job,
    JobUpdateKind,
    Metrics,
    Note,
    PathSource,
    Source,
    Span,
)
from gradient_protocol.messages.worker import JobCompleted, JobFailed, JobUpdate
from gradient_server.db.queries.cached_paths import CachedPath, put_path
from gradient_server.db.queries.claims import Claim, accept_assignment, claim_assignment
from gradient_server.db.runner import Database
from gradient_server.domain.events import Event, JobQueued, JobUnqueued
from gradient_server.domain.job import PendingJob, build_key, eval_key
from gradient_server.graph.jobs import load_job
from gradient_server.graph.reports import ReportOutcome, apply_report
from gradient_server.graph.settings import GraphSettings
from gradient_server.graph.submit import submit_evaluation

from tests.fixtures.graph import make_project, make_task, make_worker, store_path
from tests.fixtures.times import FakeClock

__all__ = ["INSTANCE", "Pool", "derivation", "hash_of", "metrics", "object_of", "output_path"]

T = TypeVar("T")

INSTANCE = "instance-1"
SOURCE = store_path("source")
_numbers = itertools.count(1)


def hash_of(text: str) -> str:
    """A well-formed NAR hash that `text` decides."""
    return "sha256:" + text.encode().hex().ljust(64, "0")[:64]


def object_of(path: str) -> str:
    """The object that holds a path: a name that the NAR store takes, though it has none."""
    return f"{hash_of(path).removeprefix('sha256:')}.nar.zst"


def output_path(name: str) -> str:
    """The store path of the output `out` of the derivation of that name."""
    return store_path(f"{name}-out")


def derivation(name: str, *inputs: str, runtime_only: Sequence[str] = (), **fields: Any) -> Derivation:  # noqa: ANN401 - many types
    """A derivation of that name with one output, on others by name."""
    fields.setdefault("sources", [])
    return Derivation(
        drv_path=store_path(f"{name}.drv"),
        name=name,
        system="any",
        features=[],
        command=["/bin/true"],
        env={},
        outputs=[DerivationOutput(name="out", path=output_path(name))],
        inputs=[
            DerivationInput(
                drv_path=store_path(f"{other}.drv"),
                outputs=["out"],
                runtime_only=other in runtime_only,
                name=other,
            )
            for other in (*inputs, *runtime_only)
        ],
        prefer_local=False,
        **fields,
    )


def metrics(*, peak_ram_mb: int | None = None, oom_killed: bool = False) -> Metrics:
    """What a build used."""
    return Metrics(build_time_ms=10, oom_killed=oom_killed, concurrent_builds=1, peak_ram_mb=peak_ram_mb)


class Pool:
    """One database, one project, workers by name; it keeps the sequence numbers and the queue."""

    def __init__(self, database: Database, clock: FakeClock, ids: IdSource, settings: GraphSettings) -> None:
        self.database = database
        self.clock = clock
        self.ids = ids
        self.settings = settings
        # What a scheduler would know: kept from events alone.
        self.queued: dict[str, PendingJob] = {}
        self.events: list[Event] = []
        self._seq: dict[str, int] = {}
        self._workers: dict[str, str] = {}

    async def run(self, fn: Callable[[sa.Connection], T]) -> T:
        return await self.database.run(fn)

    def publish(self, events: Iterable[Event]) -> None:
        """What the bus would do after a commit."""
        for event in events:
            self.events.append(event)
            if isinstance(event, JobQueued):
                self.queued[event.job.job_id] = event.job
            elif isinstance(event, JobUnqueued):
                self.queued.pop(event.job_id, None)

    def seen(self, kind: type[T]) -> list[T]:
        """Events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def worker(self, name: str) -> str:
        if name not in self._workers:
            self._workers[name] = await self.run(lambda c: make_worker(c, f"{name}-{next(_numbers)}"))
        return self._workers[name]

    async def submit(
        self,
        *,
        project: str = "demo",
        source: Source | None = None,
        hold_source: bool = True,
        **fields: Any,  # noqa: ANN401 - many types
    ) -> str:
        """A queued evaluation, by id; its source is in the store."""
        # Ids sort by their time, so that later rows are found as such.
        self.clock.advance(1)
        if hold_source and source is None:
            await self.hold(SOURCE)

        def do(connection: sa.Connection) -> tuple[str, list[Event]]:
            project_id = make_project(connection, project)
            return submit_evaluation(
                connection,
                project=project_id,
                task=make_task(connection, project_id),
                source=source or PathSource(path=SOURCE),
                attrs=[],
                now=self.clock.now(),
                ids=self.ids,
                **{"source_path": None, "prioritized": False, "build_request": True, **fields},
            )

        evaluation, events = await self.run(do)
        self.publish(events)
        return evaluation

    async def hold(self, path: str, *, nar_hash: str | None = None, references: Sequence[str] = ()) -> None:
        """The path is in the server's store."""
        stored = CachedPath(
            path=path,
            nar_hash=nar_hash or hash_of(path),
            nar_size=100,
            file_size=50,
            compression=Compression.ZSTD,
            object=object_of(path),
            references=tuple(references),
        )
        await self.run(lambda c: put_path(c, stored, now=self.clock.now()))

    async def claim(self, job_key: str, worker: str = "w1", *, accept: bool = True) -> str | None:
        """The assignment's id, None if the job cannot be claimed."""
        worker_id = await self.worker(worker)
        assignment = self.ids.new()
        claim = Claim(assignment_id=assignment, job_key=job_key, worker_id=worker_id, instance_id=INSTANCE)

        def do(connection: sa.Connection) -> bool:
            now = self.clock.now()
            if not claim_assignment(connection, claim, now=now):
                return False
            return not accept or accept_assignment(connection, assignment, worker_id, now=now)

        if not await self.run(do):
            return None
        self.queued.pop(job_key, None)
        self._seq[assignment] = 0
        return assignment

    async def job(self, job_key: str, steps: Sequence[EvalStep] | None = None) -> Job:
        return await self.run(lambda c: load_job(c, job_key, steps=steps))

    async def report(
        self, message: JobUpdate | JobCompleted | JobFailed, worker: str = "w1", instance: str = INSTANCE
    ) -> ReportOutcome:
        worker_id = await self.worker(worker)
        outcome = await self.run(
            lambda c: apply_report(
                c,
                worker_id=worker_id,
                instance_id=instance,
                message=message,
                now=self.clock.now(),
                ids=self.ids,
                settings=self.settings,
            )
        )
        self.publish(outcome.events)
        return outcome

    def next_seq(self, assignment: str) -> int:
        self._seq[assignment] = self._seq.get(assignment, 0) + 1
        return self._seq[assignment]

    async def update(self, assignment: str, update: JobUpdateKind, worker: str = "w1") -> ReportOutcome:
        message = JobUpdate(assignment_id=assignment, seq=self.next_seq(assignment), update=update)
        return await self.report(message, worker)

    async def batch(
        self,
        assignment: str,
        *derivations: Derivation,
        clusters: Sequence[Cluster] = (),
        errors: Sequence[str] = (),
        worker: str = "w1",
    ) -> ReportOutcome:
        result = EvalResult(
            derivations=list(derivations),
            clusters=list(clusters),
            warnings=[],
            errors=[Note(message=error) for error in errors],
        )
        return await self.update(assignment, result, worker)

    async def complete(
        self, assignment: str, worker: str = "w1", spans: Sequence[Span] = ()
    ) -> ReportOutcome:
        seq = self.next_seq(assignment)
        message = JobCompleted(assignment_id=assignment, seq=seq, spans=list(spans), spans_dropped=0)
        return await self.report(message, worker)

    async def fail(
        self,
        assignment: str,
        kind: FailureKind,
        *,
        missing: Sequence[str] = (),
        used: Metrics | None = None,
        worker: str = "w1",
    ) -> ReportOutcome:
        message = JobFailed(
            assignment_id=assignment,
            seq=self.next_seq(assignment),
            kind=kind,
            error=f"it ended {kind}",
            missing_paths=list(missing),
            spans=[],
            spans_dropped=0,
            metrics=used,
        )
        return await self.report(message, worker)

    async def build(self, job_key: str, worker: str = "w1", *, references: Sequence[str] = ()) -> None:
        """Claims a queued build and brings it to its end: output reported, uploaded, completed."""
        assignment = await self.claim(job_key, worker)
        assert assignment is not None, f"{job_key} cannot be claimed"
        job = await self.job(job_key)
        await self.output(assignment, job, worker)
        for output in job.outputs:  # type: ignore[union-attr]  # it is a build
            await self.hold(output.path, references=references)
        outcome = await self.complete(assignment, worker)
        assert outcome.closed

    async def output(self, assignment: str, job: Job, worker: str = "w1", **fields: Any) -> ReportOutcome:  # noqa: ANN401 - many types
        built = [
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
        fields = {"products": [], "substituted": False, "metrics": metrics(), **fields}
        return await self.update(assignment, BuildOutput(outputs=built, **fields), worker)

    async def evaluate(
        self,
        evaluation: str,
        *batches: Sequence[Derivation],
        worker: str = "w1",
        **fields: Any,  # noqa: ANN401 - many types
    ) -> None:
        """Claims a queued evaluation and walks it to its end."""
        assignment = await self.claim(eval_key(evaluation), worker)
        assert assignment is not None
        for derivations in batches:
            outcome = await self.batch(assignment, *derivations, worker=worker, **fields)
            assert outcome.refused is None, outcome.refused
        await self.complete(assignment, worker)

    async def scalar(self, text: str, **parameters: Any) -> Any:  # noqa: ANN401 - any column
        return await self.run(lambda c: c.execute(sa.text(text), parameters).scalar())

    async def evaluation_status(self, evaluation: str) -> str:
        return str(await self.scalar("SELECT status FROM evaluation WHERE id = :id", id=evaluation))

    async def statuses(self) -> dict[str, str]:
        """The latest build of each derivation, by name."""

        def do(connection: sa.Connection) -> dict[str, str]:
            rows = connection.execute(
                sa.text(
                    "SELECT d.name, b.status FROM derivation_build b JOIN derivation d ON d.id = b.derivation"
                    " ORDER BY b.created_at, b.id"
                )
            )
            return {row[0]: row[1] for row in rows}

        return await self.run(do)

    async def build_id(self, name: str) -> str:
        """The latest build of the derivation of that name."""
        return str(
            await self.scalar(
                "SELECT b.id FROM derivation_build b JOIN derivation d ON d.id = b.derivation"
                " WHERE d.name = :name ORDER BY b.created_at DESC, b.id DESC LIMIT 1",
                name=name,
            )
        )

    async def key(self, name: str) -> str:
        return build_key(await self.build_id(name))
