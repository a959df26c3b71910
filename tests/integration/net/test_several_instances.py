"""Where the workers of one instance go, when their jobs or the instance are elsewhere (protocol.md)."""

from pathlib import Path

import sqlalchemy as sa
import trio
from gradient_protocol.handshake import HandshakeOutcome, Rejected
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.common import Draining
from gradient_server.db.queries.instances import database_now, register_instance, stop_instance
from gradient_server.db.runner import Database
from gradient_server.net.farewell import farewell

from tests.fakes.pool import Pool, running_pool
from tests.fakes.worker import connected_worker
from tests.fixtures.graph import assigned, make_build
from tests.integration.net.test_handshake import shake, tokens

THERE = "tls://there.example.org:3001"


async def with_another(pool: Pool) -> None:
    """This instance and a second one, both alive."""

    def enter(connection: sa.Connection) -> None:
        now = database_now(connection)
        register_instance(connection, pool.services.instance_id, advertise_url="tls://here:1", now=now)
        register_instance(connection, "other", advertise_url=THERE, now=now)

    await pool.services.database.run(enter)
    await pool.services.succession.beat()


async def test_a_worker_is_sent_to_whoever_has_its_jobs(postgres_database: Database, tmp_path: Path) -> None:
    async with running_pool(postgres_database, tmp_path) as pool:
        await with_another(pool)
        known = await pool.register("host")

        def give(connection: sa.Connection) -> None:
            assigned(connection, worker=known.worker_id, build=make_build(connection), instance="other")

        await postgres_database.run(give)
        elsewhere = await shake(pool, known.worker_id, tokens(known))
        assert isinstance(elsewhere, Rejected)
        assert (elsewhere.code, elsewhere.url) == (421, THERE)
        # Nobody is sent anywhere who has not proved who it is.
        stranger = await shake(pool, known.worker_id, {known.peer: "wrong"})
        assert isinstance(stranger, Rejected)
        assert (stranger.code, stranger.url) == (401, None)
        await postgres_database.run(lambda c: stop_instance(c, "other", now=database_now(c)))
        between = await shake(pool, known.worker_id, tokens(known))
        assert isinstance(between, Rejected)
        assert (between.code, between.url) == (503, None)
        assert await pool.services.succession.succeed("other", silent_since=0.0)
        assert isinstance(await shake(pool, known.worker_id, tokens(known)), HandshakeOutcome)


async def test_an_instance_that_stops_sends_who_has_no_jobs_to_a_living_one(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        await with_another(pool)
        busy, idle, new = [await pool.register(name) for name in ("busy", "idle", "new")]
        await pool.submit()
        async with (
            connected_worker(await pool.stream(), worker_id=busy.worker_id, tokens=tokens(busy)) as working,
            connected_worker(await pool.stream(), worker_id=idle.worker_id, tokens=tokens(idle)) as waiting,
            trio.open_nursery() as nursery,
        ):
            await working.accept(JobKind.EVAL)
            await pool.until("SELECT count(*) FROM dispatched_job WHERE status = 'Accepted'", 1)
            nursery.start_soon(farewell, pool.services)
            assert (await waiting.expect(Draining)).url == THERE
            assert (await working.expect(Draining)).url is None
        refused = await shake(pool, new.worker_id, tokens(new))
        assert isinstance(refused, Rejected)
        assert (refused.code, refused.url) == (503, THERE)
        assert isinstance(await shake(pool, busy.worker_id, tokens(busy)), HandshakeOutcome)


async def test_an_instance_alone_names_no_other(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        await with_another(pool)
        await sqlite_database.run(lambda c: stop_instance(c, "other", now=database_now(c)))
        await pool.services.succession.beat()
        assert pool.services.succession.elsewhere() is None
