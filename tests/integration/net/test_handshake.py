"""Who gets a session: tokens, unknown workers, duplicates, a full server, re-authentication."""

from pathlib import Path

import sqlalchemy as sa
import trio
from gradient_protocol.codec import Side
from gradient_protocol.connection import Connection
from gradient_protocol.handshake import HandshakeOutcome, Rejected, handshake_as_worker
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind
from gradient_protocol.limits import PROTO_VERSION
from gradient_protocol.messages import server
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.common import Error
from gradient_server.db.queries.registry import Registration, create_project, revoke_worker
from gradient_server.db.runner import Database
from gradient_server.net.authority import worker_registered, worker_revoked

from tests.fakes.pool import Pool, running_pool
from tests.fakes.worker import BUILDS_AND_EVALUATES, connected_worker


def tokens(*registered: Registration) -> dict[str, str]:
    return {one.peer: one.token for one in registered}


async def shake(
    pool: Pool, worker_id: str, given: dict[str, str], *, version: int = PROTO_VERSION
) -> HandshakeOutcome | Rejected:
    connection = Connection(await pool.stream(), Side.WORKER)
    hello = w.InitConnection(
        version=version,
        worker_id=worker_id,
        name="fake",
        incarnation=IdSource().new(),
        capabilities=BUILDS_AND_EVALUATES,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(connection.run)
        try:
            return await handshake_as_worker(connection, hello, given)
        finally:
            await connection.aclose()
            nursery.cancel_scope.cancel()
    raise AssertionError("unreachable")


async def test_bad_tokens_and_unknown_workers(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        known = await pool.register("host-a")
        wrong = await shake(pool, known.worker_id, {known.peer: "wrong"})
        assert isinstance(wrong, Rejected)
        assert wrong.code == 401
        missing = await shake(pool, known.worker_id, {})
        assert isinstance(missing, Rejected)
        assert missing.code == 401
        unknown = await shake(pool, "nobody", {"*": known.token})
        assert isinstance(unknown, Rejected)
        assert unknown.code == 403
        assert "gradient worker register" in unknown.reason
        old = await shake(pool, known.worker_id, tokens(known), version=PROTO_VERSION + 1)
        assert isinstance(old, Rejected)
        assert old.code == 400
        assert isinstance(await shake(pool, known.worker_id, tokens(known)), HandshakeOutcome)


async def test_one_good_token_is_enough(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        services = pool.services
        project = await sqlite_database.run(
            lambda connection: create_project(connection, "other", now=1.0, ids=services.ids)
        )
        base = await pool.register("host-a")
        await pool.register("host-a", project)
        outcome = await shake(pool, base.worker_id, {base.peer: base.token, project: "wrong"})
        assert isinstance(outcome, HandshakeOutcome)
        assert outcome.authorized_peers == (base.peer,)
        assert list(outcome.failed_peers) == [project]


async def test_a_second_agent_is_refused_and_the_same_one_takes_over(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        known = await pool.register("host-a")
        common = {"worker_id": known.worker_id, "tokens": tokens(known)}
        async with connected_worker(await pool.stream(), incarnation="one", **common) as first:
            refused = await shake(pool, known.worker_id, tokens(known))
            assert isinstance(refused, Rejected)
            assert refused.code == 496
            async with connected_worker(await pool.stream(), incarnation="one", **common) as second:
                with trio.fail_after(5):
                    while first.ended is None:
                        await trio.sleep(0.01)
                second.send(w.WorkerMetrics(n=7, lateness_secs=0.0))
                assert (await second.expect(server.HeartbeatAck)).n == 7
                assert len(pool.services.sessions) == 1


async def test_a_full_server_refuses_all_but_the_owners_of_its_jobs(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with running_pool(sqlite_database, tmp_path, proto_max_connections="1") as pool:
        busy, idle = await pool.register("busy"), await pool.register("idle")
        await pool.submit()
        async with connected_worker(
            await pool.stream(), worker_id=busy.worker_id, tokens=tokens(busy)
        ) as worker:
            await worker.accept(JobKind.EVAL)
            await pool.until("SELECT count(*) FROM dispatched_job WHERE status = 'Accepted'", 1)
        with trio.fail_after(5):
            while len(pool.services.sessions):
                await trio.sleep(0.01)
        async with connected_worker(await pool.stream(), worker_id=idle.worker_id, tokens=tokens(idle)):
            owner = await shake(pool, busy.worker_id, tokens(busy))
            assert isinstance(owner, HandshakeOutcome)
            third = await pool.register("third")
            refused = await shake(pool, third.worker_id, tokens(third))
            assert isinstance(refused, Rejected)
            assert refused.code == 503


async def test_reauthentication_in_place(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        services = pool.services
        project = await sqlite_database.run(
            lambda connection: create_project(connection, "other", now=1.0, ids=services.ids)
        )
        base = await pool.register("host-a")
        async with connected_worker(
            await pool.stream(), worker_id=base.worker_id, tokens=tokens(base)
        ) as worker:
            added = await pool.register("host-a", project)
            await worker_registered(services, base.worker_id)
            challenge = await worker.expect(server.AuthChallenge)
            assert sorted(challenge.peers) == sorted([base.peer, project])
            worker.send(w.AuthResponse(tokens=tokens(base, added)))
            update = await worker.expect(server.AuthUpdate)
            assert sorted(update.authorized_peers) == sorted([base.peer, project])
            worker.send(w.ReauthRequest())
            await worker.expect(server.AuthChallenge)
            worker.send(w.AuthResponse(tokens={}))
            assert (await worker.expect(Error)).code == 401


async def test_a_revoked_worker_loses_its_jobs_and_its_session(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        known = await pool.register("host-a")
        evaluation = await pool.submit()
        async with connected_worker(
            await pool.stream(), worker_id=known.worker_id, tokens=tokens(known)
        ) as worker:
            job = await worker.accept(JobKind.EVAL)
            await pool.until("SELECT count(*) FROM dispatched_job WHERE status = 'Accepted'", 1)

            def revoke(connection: sa.Connection) -> None:
                revoke_worker(connection, "host-a", None, now=1.0)

            await sqlite_database.run(revoke)
            await worker_revoked(pool.services, known.worker_id)
            abort = await worker.expect(server.AbortJob)
            assert abort.assignment_id == job.assignment_id
            assert (await worker.expect(Error)).code == 403
        again = await shake(pool, known.worker_id, tokens(known))
        assert isinstance(again, Rejected)
        assert again.code == 403
        stored = "SELECT abort_reason FROM dispatched_job WHERE evaluation = :id"
        assert await pool.scalar(stored, id=evaluation) == "Revoked"
