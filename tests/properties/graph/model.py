"""A graph under random events: what sessions would report, in any order, and what must hold after each."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import Compression, FailureKind, JobKind
from gradient_protocol.messages.shapes import (
    Derivation,
    DerivationInput,
    DerivationOutput,
    EvalResult,
    PathSource,
)
from gradient_protocol.messages.worker import ImportRequest, JobCompleted, JobFailed, JobUpdate
from gradient_server.db.queries.cached_paths import CachedPath, put_path
from gradient_server.db.queries.claims import (
    Claim,
    accept_assignment,
    claim_assignment,
    reject_assignment,
)
from gradient_server.domain.events import Event, JobQueued, JobUnqueued
from gradient_server.domain.job import PendingJob, split_job_key
from gradient_server.domain.status import AbortReason
from gradient_server.graph.aborts import abort_assignments, abort_evaluation, abort_job, reap_unconfirmed
from gradient_server.graph.imports import request_import
from gradient_server.graph.jobs import load_job, load_pending
from gradient_server.graph.reports import apply_report
from gradient_server.graph.resume import lose_assignments, resume
from gradient_server.graph.submit import submit_evaluation
from gradient_server.graph.sweeps import find_stuck

from tests.fixtures.graph import make_project, make_task, store_path
from tests.fixtures.times import START

T = TypeVar("T")

INSTANCE = "instance-1"
WORKER = "worker-1"
HASH = "sha256:" + "0" * 64
SOURCE = store_path("source")


def drv_path(number: int) -> str:
    return store_path(f"node-{number}.drv")


def output_path(number: int) -> str:
    return store_path(f"node-{number}-out")


def derivations_of(edges: Sequence[Sequence[tuple[int, bool]]]) -> list[Derivation]:
    """Node `n` needs the nodes of `edges[n]`, all smaller than n; True marks a runtime-only edge."""
    return [
        Derivation(
            drv_path=drv_path(number),
            name=f"node-{number}",
            system="any",
            features=[],
            command=["/bin/true"],
            env={},
            outputs=[DerivationOutput(name="out", path=output_path(number))],
            inputs=[
                DerivationInput(drv_path=drv_path(other), outputs=["out"], runtime_only=runtime_only)
                for other, runtime_only in dict(needed).items()
            ],
            sources=[SOURCE] if number % 3 == 0 else [],
            prefer_local=False,
        )
        for number, needed in enumerate(edges)
    ]


class Model:
    """One database; every method is an event of the outside world, on whatever `pick` chooses."""

    def __init__(self, connection: sa.Connection, edges: Sequence[Sequence[tuple[int, bool]]]) -> None:
        self.connection = connection
        self.derivations = derivations_of(edges)
        self.now = START
        self.ids = IdSource.seeded(1, lambda: self.now)
        self.queued: dict[str, PendingJob] = {}
        self.evaluations: list[str] = []
        # Open assignments: the job, the next number, and how many derivations were streamed.
        self.open: dict[str, tuple[str, int]] = {}
        self.streamed: dict[str, int] = {}
        self.run(lambda c: put_path(c, _held(SOURCE), now=self.now))

    def run(self, fn: Callable[[sa.Connection], T]) -> T:
        with self.connection.begin():
            return fn(self.connection)

    def publish(self, events: Sequence[Event] | None) -> None:
        for event in events or ():
            if isinstance(event, JobQueued):
                self.queued[event.job.job_id] = event.job
            elif isinstance(event, JobUnqueued):
                self.queued.pop(event.job_id, None)

    # What happens outside.

    def submit(self, pick: int) -> None:
        if len(self.evaluations) >= 4:
            return
        self.now += 1

        def do(c: sa.Connection) -> tuple[str, list[Event]]:
            project = make_project(c, f"project-{pick % 2}")
            return submit_evaluation(
                c,
                project=project,
                task=make_task(c, project),
                source=PathSource(path=SOURCE),
                source_path=SOURCE,
                attrs=[],
                prioritized=pick % 3 == 0,
                build_request=True,
                now=self.now,
                ids=self.ids,
            )

        evaluation, events = self.run(do)
        self.evaluations.append(evaluation)
        self.publish(events)

    def claim(self, pick: int) -> None:
        due = [key for key, job in self.queued.items() if (job.not_before or 0.0) <= self.now]
        if due:
            self.claim_key(due[pick % len(due)], accept=pick % 4 != 0)

    def claim_key(self, key: str, *, accept: bool = True) -> None:
        assignment = self.ids.new()
        claim = Claim(assignment_id=assignment, job_key=key, worker_id=WORKER, instance_id=INSTANCE)

        def do(c: sa.Connection) -> bool:
            if not claim_assignment(c, claim, now=self.now):
                return False
            load_job(c, key)
            return not accept or accept_assignment(c, assignment, WORKER, now=self.now)

        assert self.run(do), f"{key} is offered and cannot be claimed"
        self.queued.pop(key)
        self.open[assignment] = (key, 0)
        self.streamed[assignment] = 0

    def reject(self, pick: int) -> None:
        assignment = self._pick_open(pick)
        if assignment is None:
            return
        closed = self.run(lambda c: reject_assignment(c, assignment, WORKER, now=self.now))
        if closed is not None:
            key, _ = self.open.pop(assignment)
            # The scheduler puts a rejected job back itself.
            self.publish([JobQueued(job) for job in self.run(lambda c: load_pending(c, [key], self.now))])

    def stream(self, pick: int) -> None:
        """An evaluation reports the next part of its walk; a pruned one now and then only its end."""
        assignment = self._pick_open(pick, JobKind.EVAL)
        if assignment is None:
            return
        start = self.streamed[assignment]
        part = self.derivations[start : start + 1 + pick % 4]
        self.streamed[assignment] = start + len(part)
        batch = EvalResult(derivations=part, clusters=[], warnings=[], errors=[])
        update = JobUpdate(assignment_id=assignment, seq=self._next(assignment), update=batch)
        assert self.report(update) is None

    def succeed(self, pick: int) -> None:
        assignment = self._pick_open(pick)
        if assignment is not None:
            self.succeed_one(assignment)

    def succeed_one(self, assignment: str) -> None:
        key, _ = self.open[assignment]
        kind, job = split_job_key(key)
        if kind is JobKind.BUILD:
            for path in self._outputs(job):
                self.run(lambda c, path=path: put_path(c, _held(path), now=self.now))  # type: ignore[misc]  # a default
        seq = self._next(assignment)
        self.report(JobCompleted(assignment_id=assignment, seq=seq, spans=[], spans_dropped=0))
        self.open.pop(assignment)

    def complete_without_outputs(self, pick: int) -> None:
        assignment = self._pick_open(pick)
        if assignment is not None:
            seq = self._next(assignment)
            self.report(JobCompleted(assignment_id=assignment, seq=seq, spans=[], spans_dropped=0))
            self.open.pop(assignment)

    def fail(self, pick: int) -> None:
        assignment = self._pick_open(pick)
        if assignment is None:
            return
        kinds = list(FailureKind)
        missing = [output_path(pick % max(len(self.derivations), 1))]
        failed = JobFailed(
            assignment_id=assignment,
            seq=self._next(assignment),
            kind=kinds[pick // 7 % len(kinds)],
            error="no",
            missing_paths=missing,
            spans=[],
            spans_dropped=0,
        )
        self.report(failed)
        self.open.pop(assignment)

    def lose(self, pick: int) -> None:
        assignment = self._pick_open(pick)
        if assignment is not None:
            self.publish(
                self.run(
                    lambda c: lose_assignments(
                        c, [assignment], instance_id=INSTANCE, now=self.now, ids=self.ids
                    )
                )
            )
            self.open.pop(assignment)

    def resume_empty(self, pick: int) -> None:
        if pick % 5:
            return
        decision = self.run(
            lambda c: resume(
                c, worker_id=WORKER, instance_id=INSTANCE, running=[], now=self.now, ids=self.ids
            )
        )
        self.publish(decision.events)
        self.open.clear()

    def abort_evaluation(self, pick: int) -> None:
        if self.evaluations and pick % 2:
            evaluation = self.evaluations[pick // 2 % len(self.evaluations)]
            self.publish(self.run(lambda c: abort_evaluation(c, evaluation, now=self.now, ids=self.ids)))

    def abort_job(self, pick: int) -> None:
        keys = self.run(
            lambda c: c.scalars(sa.text("SELECT 'build:' || id FROM derivation_build ORDER BY id"))
        )
        wanted = list(keys) if pick % 3 == 0 else []
        if wanted:
            key = wanted[pick // 3 % len(wanted)]
            self.publish(self.run(lambda c: abort_job(c, key, now=self.now, ids=self.ids)))

    def drain_one(self, pick: int) -> None:
        assignment = self._pick_open(pick)
        if assignment is not None:
            self.publish(
                self.run(
                    lambda c: abort_assignments(
                        c, [assignment], AbortReason.DRAINED, now=self.now, ids=self.ids, text=""
                    )
                )
            )

    def reap(self, pick: int) -> None:
        assignment = self._pick_open(pick)
        if assignment is None:
            return
        self.publish(self.run(lambda c: reap_unconfirmed(c, [assignment], now=self.now, ids=self.ids)))
        still = self.run(
            lambda c: c.scalar(
                sa.text("SELECT 1 FROM dispatched_job WHERE id = :id AND finished_at IS NULL"),
                {"id": assignment},
            )
        )
        if still is None:
            self.open.pop(assignment)

    def ask_for_import(self, pick: int) -> None:
        assignment = self._pick_open(pick, JobKind.EVAL)
        if assignment is not None:
            path = output_path(pick % len(self.derivations))
            query = ImportRequest(query_id=self.ids.new(), assignment_id=assignment, paths=[path])
            self.publish(
                self.run(lambda c: request_import(c, query, worker_id=WORKER, now=self.now, ids=self.ids))
            )

    def lose_path(self, pick: int) -> None:
        """The store loses an output without anyone's knowledge."""
        path = output_path(pick % len(self.derivations))
        self.run(lambda c: c.execute(sa.text("DELETE FROM cached_path WHERE path = :path"), {"path": path}))

    def wait(self, pick: int) -> None:
        self.now += pick % 100

    def settle(self) -> None:
        """From here on all goes well: everything that is started succeeds, until nothing is left to do."""
        for _ in range(20 * len(self.derivations) + 50):
            for assignment in list(self.open):
                self.succeed_one(assignment)
            if not self.queued:
                return
            self.now += 1_000
            self.claim_key(next(iter(self.queued)))
        raise AssertionError(f"it never ends: {sorted(self.queued)}")

    # What must hold, always.

    def check(self) -> None:
        for name, text in RULES.items():
            broken = self.run(lambda c, text=text: c.execute(sa.text(text)).all())  # type: ignore[misc]  # a default
            assert not broken, f"{name}: {broken}"
        stuck = self.run(find_stuck)
        assert not len(stuck), f"the watchdog would repair {stuck}"
        stored = self.run(lambda c: load_pending(c, None, self.now))
        assert {job.job_id: _known(job) for job in stored} == {
            key: _known(job) for key, job in self.queued.items()
        }

    def check_settled(self) -> None:
        for table in ("evaluation", "derivation_build", "dispatched_job"):
            left = self.run(
                lambda c, table=table: c.scalar(  # type: ignore[misc]  # a default
                    sa.text(f"SELECT COUNT(*) FROM {table} WHERE finished_at IS NULL")
                )
            )
            assert left == 0, f"{left} of {table} are still open"

    def report(self, message: JobUpdate | JobCompleted | JobFailed) -> str | None:
        outcome = self.run(
            lambda c: apply_report(
                c, worker_id=WORKER, instance_id=INSTANCE, message=message, now=self.now, ids=self.ids
            )
        )
        assert outcome.error is None
        self.publish(outcome.events)
        return outcome.refused

    def _pick_open(self, pick: int, kind: JobKind | None = None) -> str | None:
        fitting = [a for a, (key, _) in self.open.items() if kind in (None, split_job_key(key)[0])]
        return fitting[pick % len(fitting)] if fitting else None

    def _next(self, assignment: str) -> int:
        key, seq = self.open[assignment]
        self.open[assignment] = (key, seq + 1)
        return seq + 1

    def _outputs(self, build: str) -> list[str]:
        def do(c: sa.Connection) -> list[Any]:
            text = sa.text(
                "SELECT o.path FROM derivation_output o JOIN derivation_build b ON"
                " b.derivation = o.derivation"
                " WHERE b.id = :id"
            )
            return list(c.scalars(text, {"id": build}))

        return self.run(do)


def _known(job: PendingJob) -> PendingJob:
    """The job without what the store changes behind everyone's back (`lose_path`)."""
    return dataclasses.replace(job, required_paths=())


def _held(path: str) -> CachedPath:
    return CachedPath(
        path=path,
        nar_hash=HASH,
        nar_size=1,
        file_size=1,
        compression=Compression.NONE,
        object="x",
        references=(),
    )


_NEEDS = (
    "FROM derivation_build b"
    " JOIN derivation_dependency e ON e.derivation = b.derivation AND NOT e.runtime_only"
)
_COMPLETED = "SELECT 1 FROM derivation_build c WHERE c.derivation = e.dependency AND c.status = 'Completed'"
_CURRENT = (
    "SELECT 1 FROM derivation_build c WHERE c.derivation = e.dependency"
    " AND c.status IN ('Created', 'Queued', 'Assigned', 'Completed')"
)
_OPEN_WISH = "SELECT 1 FROM build_job j WHERE j.build = b.id AND j.outcome IS NULL"

# Each finds what breaks it.
RULES = {
    "no build is queued before its dependencies completed": (
        f"SELECT b.id {_NEEDS} WHERE b.status = 'Queued' AND NOT EXISTS ({_COMPLETED})"
    ),
    "no build waits for nothing": (
        "SELECT b.id FROM derivation_build b WHERE b.status = 'Created' AND NOT EXISTS (SELECT 1 FROM"
        " derivation_dependency e WHERE e.derivation = b.derivation AND NOT e.runtime_only"
        f" AND NOT EXISTS ({_COMPLETED}))"
    ),
    "no build waits for what failed": (
        f"SELECT b.id {_NEEDS} WHERE b.status = 'Created' AND NOT EXISTS ({_CURRENT})"
    ),
    "an ended build is no open wish": (
        f"SELECT b.id FROM derivation_build b WHERE b.finished_at IS NOT NULL AND EXISTS ({_OPEN_WISH})"
    ),
    "a waiting build is somebody's wish": (
        "SELECT b.id FROM derivation_build b WHERE b.status IN ('Created', 'Queued')"
        f" AND NOT EXISTS ({_OPEN_WISH})"
    ),
    "a final state and an end go together": (
        "SELECT b.id FROM derivation_build b WHERE (b.finished_at IS NULL) <>"
        " (b.status IN ('Created', 'Queued', 'Assigned'))"
    ),
    "an open evaluation waits for what is made again": (
        "SELECT j.id FROM build_job j JOIN evaluation v ON v.id = j.evaluation AND v.finished_at IS NULL"
        " JOIN derivation_build b ON b.id = j.build WHERE j.outcome = 'Completed' AND b.status <> 'Completed'"
    ),
    "an ended evaluation wishes nothing": (
        "SELECT v.id FROM evaluation v JOIN build_job j ON j.evaluation = v.id AND j.outcome IS NULL"
        " WHERE v.finished_at IS NOT NULL"
    ),
    "an evaluation with everything ends": (
        "SELECT v.id FROM evaluation v WHERE v.status = 'Building' AND NOT EXISTS"
        " (SELECT 1 FROM build_job j WHERE j.evaluation = v.id AND j.outcome IS NULL)"
    ),
    "an assigned build has one open assignment": (
        "SELECT b.id FROM derivation_build b WHERE (b.status = 'Assigned') <> (EXISTS (SELECT 1 FROM"
        " dispatched_job a WHERE a.derivation_build = b.id AND a.finished_at IS NULL))"
    ),
    "a build runs once for each time it was wanted anew": (
        "SELECT build FROM build_attempt WHERE outcome = 'Completed' GROUP BY build HAVING COUNT(*) > 1"
        " AND NOT EXISTS (SELECT 1 FROM build_attempt t WHERE t.outcome = 'InputsUnavailable')"
    ),
}
