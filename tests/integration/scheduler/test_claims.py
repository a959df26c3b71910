"""The scheduler on a real database: what it assigns is a row before it is sent, whatever is answered."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
import sqlalchemy as sa
import trio
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import EvalStep, JobKind
from gradient_protocol.messages.server import AssignJob
from gradient_protocol.messages.shapes import EvalJob
from gradient_protocol.messages.worker import AssignJobResponse, CandidateScore, CandidateScores
from gradient_server.clock import SystemClock
from gradient_server.db import tables
from gradient_server.db.bridge import Together
from gradient_server.db.errors import InDoubtError
from gradient_server.db.runner import Database
from gradient_server.domain.events import Bus
from gradient_server.domain.job import build_key, eval_key
from gradient_server.domain.status import EvaluationStatus
from gradient_server.graph.aborts import abort_job
from gradient_server.graph.jobs import load_pending
from gradient_server.scheduler import loops
from gradient_server.scheduler.claim_store import DatabaseClaimStore
from gradient_server.scheduler.invariants import violations
from gradient_server.scheduler.model import SchedulerSettings
from gradient_server.scheduler.scheduler import Scheduler
from gradient_server.scoring.policy import policy_by_name

from tests.fakes.scheduler import RecordingOutbox, worker
from tests.fixtures.graph import job_status, make_build, make_evaluation, make_member, make_worker, want

T = TypeVar("T")

INSTANCE = "instance-1"
A, B = "worker-a", "worker-b"


class Pool:
    """A scheduler whose loops run, on a database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.bus = Bus()
        self.clock = SystemClock()
        ids = IdSource()
        self.ids = ids
        store = DatabaseClaimStore(database, clock=self.clock, ids=ids, instance_id=INSTANCE)
        self.scheduler = Scheduler(
            store=store,
            bus=self.bus,
            clock=self.clock,
            ids=ids,
            settings=SchedulerSettings(),
            policy=policy_by_name("resource-aware"),
        )
        self.outboxes: dict[str, RecordingOutbox] = {}

    def connect(self, worker_id: str, **changes: object) -> None:
        self.outboxes[worker_id] = RecordingOutbox()
        self.scheduler.worker_connected(worker(worker_id, **changes), self.outboxes[worker_id], [])

    def offer_scores(self, worker_id: str, *builds: str) -> None:
        scores = [
            CandidateScore(job_id=build_key(one), missing_count=1, missing_nar_size=5, outputs_present=False)
            for one in builds
        ]
        self.scheduler.candidate_scores(worker_id, CandidateScores(scores=scores, is_final=True))

    async def sent(self, worker_id: str) -> AssignJob:
        with trio.fail_after(5):
            while True:
                found = self.outboxes[worker_id].take(AssignJob)
                if found:
                    [message] = found
                    return message
                await trio.sleep(0.005)

    async def answer(self, worker_id: str, message: AssignJob, *, accepted: bool) -> None:
        response = AssignJobResponse(assignment_id=message.assignment_id, accepted=accepted, reason="test")
        self.scheduler.answer_arrived(worker_id, response)
        await self.scheduler.assignment_answered(worker_id, response)

    async def row(self, assignment_id: str) -> sa.Row[tuple[object, ...]]:
        found = tables.dispatched_job
        query = sa.select(found).where(found.c.id == assignment_id)
        return await self.database.read(lambda connection: connection.execute(query).one())

    async def status(self, job_key: str) -> str:
        return await self.database.read(lambda connection: job_status(connection, job_key))


@asynccontextmanager
async def running(database: Database, builds: int = 1) -> AsyncIterator[tuple[Pool, list[str]]]:
    """A pool with the workers of the database's, and builds that an evaluation wants."""

    def prepare(connection: sa.Connection) -> list[str]:
        for name in ("a", "b"):
            make_worker(connection, name)
        evaluation = make_evaluation(connection, status=EvaluationStatus.BUILDING)
        made = [make_build(connection) for _ in range(builds)]
        for build in made:
            want(connection, evaluation, build)
        return made

    made = await database.run(prepare)
    pool = Pool(database)
    jobs = await database.read(lambda connection: load_pending(connection, None, pool.clock.now()))
    pool.scheduler.load(jobs)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.scheduler.run)
        pool.connect(A)
        yield pool, made
        nursery.cancel_scope.cancel()
    scheduler = pool.scheduler
    assert violations(scheduler.tracker, scheduler.pool, scheduler.offers) == []


async def test_an_assignment_is_a_row_before_it_is_sent_and_accepted_after(database: Database) -> None:
    async with running(database) as (pool, [build]):
        pool.scheduler.request_job(A, JobKind.BUILD)
        pool.offer_scores(A, build)
        message = await pool.sent(A)
        row = await pool.row(message.assignment_id)
        assert (row.status, row.worker, row.instance) == ("Assigned", A, INSTANCE)
        assert (row.missing_count, row.missing_nar_size) == (1, 5)
        assert set(row.score_breakdown["rules"]) >= {"EstimatedTimeRule", "QosRule"}
        assert await pool.status(build_key(build)) == "Assigned"
        await pool.answer(A, message, accepted=True)
        assert (await pool.row(message.assignment_id)).status == "Accepted"


async def test_a_rejected_job_is_queued_again_and_goes_to_another_worker(database: Database) -> None:
    async with running(database) as (pool, [build]):
        pool.scheduler.request_job(A, JobKind.BUILD)
        pool.offer_scores(A, build)
        message = await pool.sent(A)
        await pool.answer(A, message, accepted=False)
        row = await pool.row(message.assignment_id)
        assert (row.status, row.finished_at is None) == ("Rejected", False)
        assert await pool.status(build_key(build)) == "Queued"
        pool.connect(B)
        pool.scheduler.request_job(B, JobKind.BUILD)
        pool.offer_scores(B, build)
        assert (await pool.sent(B)).job_id == build_key(build)


async def test_an_abort_that_was_stored_decides_when_the_worker_rejects(database: Database) -> None:
    async with running(database) as (pool, [build]):
        pool.scheduler.request_job(A, JobKind.BUILD)
        pool.offer_scores(A, build)
        message = await pool.sent(A)
        events = await database.run(
            lambda connection: abort_job(
                connection, build_key(build), now=pool.clock.now(), ids=pool.ids, error="not wanted"
            )
        )
        pool.bus.publish(events or [])
        await pool.answer(A, message, accepted=False)
        assert await pool.status(build_key(build)) == "Aborted"
        assert (await pool.row(message.assignment_id)).finished_at is not None
        assert pool.scheduler.pool.assignments == {}
        assert build_key(build) not in pool.scheduler.tracker


async def test_many_workers_and_one_winner_for_each_job(database: Database) -> None:
    async with running(database, builds=6) as (pool, builds):
        names = [f"worker-{number}" for number in range(12)]
        await database.run(lambda connection: [make_worker(connection, name[7:]) for name in names])
        for name in names:
            pool.connect(name)
            pool.scheduler.request_job(name, JobKind.BUILD)
            pool.offer_scores(name, *builds)
        with trio.fail_after(5):
            while len(pool.scheduler.tracker):
                await trio.sleep(0.005)
            sent: list[AssignJob] = []
            while len(sent) < len(builds):
                sent += [message for name in names for message in pool.outboxes[name].take(AssignJob)]
                await trio.sleep(0.005)
        assert sorted(message.job_id for message in sent) == sorted(map(build_key, builds))


async def test_what_another_took_is_lost_without_a_word_and_the_wish_stands(database: Database) -> None:
    async with running(database, builds=2) as (pool, [first, second]):
        await database.run(
            lambda connection: connection.execute(
                tables.derivation_build.update()
                .where(tables.derivation_build.c.id == first)
                .values(status="Assigned")
            )
        )
        pool.scheduler.request_job(A, JobKind.BUILD)
        pool.offer_scores(A, first, second)
        assert (await pool.sent(A)).job_id == build_key(second)


async def test_a_member_is_never_claimed_alone_even_if_it_joins_late(database: Database) -> None:
    async with running(database) as (pool, [build]):
        await database.run(lambda connection: make_member(connection, build=build))
        pool.scheduler.request_job(A, JobKind.BUILD)
        pool.offer_scores(A, build)
        with trio.fail_after(5):
            while build_key(build) not in pool.scheduler.dispatcher.lost:
                await trio.sleep(0.005)
        await pool.scheduler.loops.tick()
        with trio.fail_after(5):
            while build_key(build) not in pool.scheduler.tracker.members:
                await trio.sleep(0.005)
        assert await pool.status(build_key(build)) == "Queued"


async def test_the_fetch_half_of_a_split_evaluation_is_marked(sqlite_database: Database) -> None:
    evaluation = await sqlite_database.run(make_evaluation)
    async with running(sqlite_database) as (pool, _):
        pool.connect(B, fetch=False)
        pool.scheduler.request_job(B, JobKind.EVAL)
        pool.scheduler.request_job(A, JobKind.EVAL)
        message = await pool.sent(A)
        assert message.job_id == eval_key(evaluation)
        assert isinstance(message.job, EvalJob)
        assert message.job.steps == [EvalStep.FETCH]
        assert (await pool.row(message.assignment_id)).fetch_only


async def test_a_build_starts_within_a_tenth_of_a_second(sqlite_database: Database) -> None:
    async with running(sqlite_database) as (pool, [build]):
        pool.scheduler.request_job(A, JobKind.BUILD)
        took = []
        for _ in range(5):
            started = trio.current_time()
            pool.offer_scores(A, build)
            message = await pool.sent(A)
            took.append(trio.current_time() - started)
            await pool.answer(A, message, accepted=False)
            pool.scheduler.pool.workers[A].excluded.clear()
            pool.scheduler.request_job(A, JobKind.BUILD)
        assert min(took) < 0.1


@pytest.mark.parametrize("crash", ["claim", "reload"])
async def test_a_loop_that_crashes_ends_the_run(sqlite_database: Database, crash: str) -> None:
    pool = Pool(sqlite_database)

    async def broken(*_: object) -> None:
        raise RuntimeError("the disk is on fire")

    setattr(pool.scheduler.dispatcher._store, crash, broken)
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="on fire"), flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.scheduler.run)
            pool.connect(A)
            if crash == "reload":
                pool.scheduler.loops.look_up("build:x")
            else:
                from tests.fakes.scheduler import build

                pool.scheduler.load([build("x")])
                pool.scheduler.request_job(A, JobKind.BUILD)
                pool.offer_scores(A, "x")
            await trio.sleep(2)


@pytest.mark.parametrize("is_stored", [True, False])
async def test_claims_in_doubt_are_given_back_and_made_again(
    database: Database, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    in_doubt: list[str] = []
    run = database.run

    async def broken(fn: Callable[[sa.Connection], T], together: Together | None = None) -> T:
        """The connection breaks in mid-commit of the first claim."""
        if in_doubt or "DatabaseClaimStore.claim" not in fn.__qualname__:
            return await run(fn, together)
        in_doubt.append("claim")
        if is_stored:
            await run(fn, together)
        raise InDoubtError("the connection broke in mid-commit")

    monkeypatch.setattr(database, "run", broken)
    monkeypatch.setattr(loops, "ASSIGNMENT_TICK_SECS", 0.1)
    async with running(database) as (pool, [job]):
        pool.scheduler.request_job(A, JobKind.BUILD)
        pool.offer_scores(A, job)
        with trio.fail_after(30):
            while not in_doubt or pool.scheduler.tracker.get(build_key(job)) is None:
                await trio.sleep(0.005)
        # It waits again, and the wish stands.
        pool.offer_scores(A, job)
        message = await pool.sent(A)
        assert (await pool.row(message.assignment_id)).finished_at is None
        assert await pool.status(build_key(job)) == "Assigned"
        assert not violations(pool.scheduler.tracker, pool.scheduler.pool, pool.scheduler.offers)
        closed = sa.select(tables.dispatched_job.c.status).where(
            tables.dispatched_job.c.id != message.assignment_id
        )
        statuses = await database.read(lambda connection: list(connection.scalars(closed)))
        assert statuses == (["Abandoned"] if is_stored else [])
