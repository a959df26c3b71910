"""A server's worker side, without HTTP: real database, scheduler, sessions and stores."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import sqlalchemy as sa
import trio
from gradient_protocol.address import TcpAddress, connect, listener_address, open_listeners
from gradient_protocol.ids import IdSource
from gradient_protocol.messages.shapes import GitSource
from gradient_server.config import load
from gradient_server.db.queries.instances import database_now, register_instance
from gradient_server.db.queries.registry import SERVER_PEER, Registration, ensure_task, register_worker
from gradient_server.db.runner import Database
from gradient_server.domain.events import Event
from gradient_server.first_start import ensure_registry
from gradient_server.graph.submit import submit_evaluation
from gradient_server.net.listener import Door
from gradient_server.net.services import Services
from gradient_server.wiring import build_services

__all__ = ["Pool", "running_pool"]

INSTANCE = "instance-1"


class Pool:
    """A running server as tests see it."""

    def __init__(self, services: Services, address: TcpAddress, nursery: trio.Nursery) -> None:
        self.services = services
        self.address = address
        self._nursery = nursery

    async def stream(self) -> trio.abc.Stream:
        """A new connection."""
        return await connect(self.address)

    async def register(self, name: str, peer: str = SERVER_PEER) -> Registration:
        """A worker with a token."""

        def work(connection: sa.Connection) -> Registration:
            now, ids = self.services.clock.now(), self.services.ids
            return register_worker(connection, name, None, peer, now=now, ids=ids)

        return await self.services.database.run(work)

    async def submit(
        self,
        project: str = "default",
        *,
        attrs: tuple[str, ...] = (),
        url: str = "https://example.invalid/tree",
    ) -> str:
        """An evaluation that a worker is to fetch and evaluate."""
        services = self.services

        def work(connection: sa.Connection) -> tuple[str, list[Event]]:
            now = services.clock.now()
            project_id = connection.scalar(
                sa.text("SELECT id FROM project WHERE name = :name"), {"name": project}
            )
            task = ensure_task(connection, project_id, "main", now=now, ids=services.ids)
            return submit_evaluation(
                connection,
                project=project_id,
                task=task,
                source=GitSource(url=url),
                source_path=None,
                attrs=attrs,
                prioritized=False,
                build_request=True,
                now=now,
                ids=services.ids,
            )

        return await services.transact(work)

    async def scalar(self, statement: str, **parameters: object) -> object:
        """One value from the database."""
        return await self.services.database.read(
            lambda connection: connection.execute(sa.text(statement), parameters).scalar()
        )

    async def until(
        self, statement: str, wanted: object, *, within_secs: float = 30.0, **parameters: object
    ) -> None:
        """Waits until the database says so."""
        found = None
        with trio.move_on_after(within_secs):
            while (found := await self.scalar(statement, **parameters)) != wanted:
                await trio.sleep(0.02)
            return
        raise AssertionError(f"{statement}: {found!r}, not {wanted!r}")


@asynccontextmanager
async def running_pool(
    database: Database,
    base_dir: Path,
    *,
    listener: trio.abc.Listener[trio.abc.Stream] | None = None,
    **flags: object,
) -> AsyncIterator[Pool]:
    """A server on a free port of loopback, over an open database with the schema; and at `listener`."""
    config = load(file=None, environment={}, flags={"base_dir": str(base_dir), **flags}).config
    ids = IdSource()
    services = build_services(config, database, ids, INSTANCE)

    def prepare(connection: sa.Connection) -> None:
        ensure_registry(connection, now=services.clock.now(), ids=ids)
        # Else its assignments would be nobody's, and a sweep would close them.
        register_instance(connection, INSTANCE, advertise_url=None, now=database_now(connection))

    await database.run(prepare)
    listeners = await open_listeners(TcpAddress("127.0.0.1", 0))
    async with trio.open_nursery() as nursery:
        await nursery.start(services.scheduler.run)
        await nursery.start(services.clusters.run)
        await nursery.start(services.history.run)
        await nursery.start(services.graces.run)
        await nursery.start(services.sweeps.run)
        await nursery.start(services.uploads.run)
        doors = [*listeners, *([] if listener is None else [listener])]
        nursery.start_soon(Door(services).run, doors, nursery)
        address = listener_address(listeners[0])
        assert isinstance(address, TcpAddress)
        yield Pool(services, address, nursery)
        nursery.cancel_scope.cancel()
    services.logs.close()
