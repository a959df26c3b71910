"""The one place that wires the server together: `serve`, `migrate` and `check`.

Start: base directory, database (locked, migrated), what this instance owned before, what is
pending, then listeners and loops in one nursery. Any loop that fails ends the process, with its
error in the log; a stop is graceful and loses nothing (operations.md, "Signals").
"""

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import structlog
import trio
from gradient_protocol.address import listener_address, open_listeners, parse_address
from gradient_protocol.ids import IdSource
from gradient_protocol.messages.common import Draining

from gradient_server import first_start
from gradient_server.clock import SystemClock
from gradient_server.config import ServerConfig
from gradient_server.db.errors import DatabaseError
from gradient_server.db.migrate import migrate_database, schema_problem
from gradient_server.db.queries.claims import open_assignments
from gradient_server.db.queries.instances import beat_instance, register_instance, stop_instance, take_over
from gradient_server.db.runner import Database, open_database
from gradient_server.graph.jobs import load_pending
from gradient_server.http_server import serve_http
from gradient_server.net.aborts import reap_forever
from gradient_server.net.listener import Door
from gradient_server.net.services import Services
from gradient_server.web.app import create_app
from gradient_server.wiring import build_services

__all__ = ["StartError", "check", "migrate", "run_server", "serve"]

log = structlog.get_logger(__name__)

BEAT_SECS: Final = 5.0
# How long a stop waits for what has arrived to be committed, and for farewells to leave.
STOP_SECS: Final = 5.0


class StartError(Exception):
    """Why the server cannot start: one line that says what to do."""


async def migrate(config: ServerConfig) -> str:
    """Brings the database to this version's schema; a line that says what was done."""
    async with _database(config) as database:
        return await migrate_database(database)


async def check(config: ServerConfig) -> list[str]:
    """What is wrong with configuration and database, a line each; changes nothing."""
    problems: list[str] = []
    for address in config.proto_listen:
        try:
            parse_address(address)
        except ValueError as error:
            problems.append(f"proto.listen: {error}")
    for name, file in (("proto.tlsCert", config.proto_tls_cert), ("proto.tlsKey", config.proto_tls_key)):
        if file is not None and not os.access(file, os.R_OK):
            problems.append(f"{name}: {file} cannot be read")
    if not config.base_dir.is_dir():
        problems.append(f"baseDir: {config.base_dir} does not exist; `gradient-server serve` makes it")
        return problems
    try:
        async with open_database(config.database_url) as database:
            problem = await database.read(schema_problem)
    except DatabaseError as error:
        problem = str(error)
    return problems + ([problem] if problem else [])


async def serve(config: ServerConfig) -> int:
    """Runs the server until a signal; the process's exit code."""
    stop = trio.Event()
    code = 0
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_signals, stop)
            await run_server(config, stop)
            nursery.cancel_scope.cancel()
    except* StartError as group:
        raise _first(group) from None
    except* Exception as group:
        log.error("a loop failed: the server ends", exc_info=group)
        code = 1
    return code


def _first(group: BaseExceptionGroup[StartError]) -> StartError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _watch_signals(stop: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        async for number in received:
            if stop.is_set():
                log.warning("a second signal: ending at once")
                raise SystemExit(128 + number)
            log.info("stopping", signal=signal.Signals(number).name)
            stop.set()


@asynccontextmanager
async def _database(config: ServerConfig) -> AsyncIterator[Database]:
    try:
        first_start.prepare(config.base_dir)
        async with open_database(config.database_url) as database:
            yield database
    except DatabaseError as error:
        raise StartError(str(error)) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise StartError(f"{error.filename}: {error.strerror}; choose another baseDir?") from error


async def run_server(
    config: ServerConfig,
    stop: trio.Event,
    *,
    announce: Callable[[str], None] = print,
    task_status: trio.TaskStatus[Services] = trio.TASK_STATUS_IGNORED,
) -> None:
    """The whole server, from its database to its last farewell; ends soon after `stop` is set.

    `announce` gets one line for each address, and one for the first API key. Started with the
    services once it listens. StartError where it cannot start; what a loop raises ends it.
    """
    async with _database(config) as database:
        await migrate_database(database)
        ids = IdSource()
        await _make_keys(config, database, ids, announce)
        instance_id = await _enter(config, database, ids)
        services = build_services(config, database, ids, instance_id)
        pending = await database.read(lambda connection: load_pending(connection, None, services.clock.now()))
        services.scheduler.load(pending)
        owned = await database.read(lambda connection: open_assignments(connection, instance_id=instance_id))
        listeners = await _listen(config)
        async with trio.open_nursery() as connections, trio.open_nursery() as loops:
            door = Door(services)
            await loops.start(partial(services.scheduler.run))
            await loops.start(services.graces.run)
            await loops.start(partial(reap_forever, services))
            await loops.start(partial(_beat, services))
            await loops.start(services.uploads.run)
            loops.start_soon(door.run, listeners, connections)
            for worker_id in dict.fromkeys(assignment.worker_id for assignment in owned):
                services.graces.arm(worker_id)
            for listener in listeners:
                announce(f"workers: {listener_address(listener)}")
            http = await loops.start(
                partial(
                    serve_http,
                    create_app(services),
                    host=config.listen_addr,
                    port=config.port,
                    stopping=services.draining,
                )
            )
            for address in http:
                announce(f"http: {address}")
            task_status.started(services)
            await stop.wait()
            await _farewell(services)
            connections.cancel_scope.cancel()
            loops.cancel_scope.cancel()
        now = services.clock.now()
        await database.run(partial(stop_instance, instance_id=instance_id, now=now))
        log.info("stopped")


async def _make_keys(
    config: ServerConfig, database: Database, ids: IdSource, announce: Callable[[str], None]
) -> None:
    now = SystemClock().now()
    key = await database.run(lambda connection: first_start.ensure_registry(connection, now=now, ids=ids))
    if key is not None:
        announce(f"api key: {first_start.write_secret(config.base_dir, key)}")


async def _enter(config: ServerConfig, database: Database, ids: IdSource) -> str:
    """Registers this instance; under a new id where another one took over what it owned."""
    now = SystemClock().now()
    instance_id = first_start.instance_id(config.base_dir, ids)
    while not await database.run(
        partial(register_instance, instance_id=instance_id, advertise_url=config.proto_advertise_url, now=now)
    ):
        instance_id = ids.new()
        first_start.replace_instance_id(config.base_dir, instance_id)
    found = await database.run(
        lambda connection: take_over(connection, instance_id, instance_id, silent_since=now, now=now)
    )
    if found is not None and found.assignments:
        log.info("took over what this instance owned", assignments=len(found.assignments))
    return instance_id


async def _listen(config: ServerConfig) -> list[trio.abc.Listener[trio.abc.Stream]]:
    listeners: list[trio.abc.Listener[trio.abc.Stream]] = []
    for text in config.proto_listen:
        try:
            listeners += await open_listeners(
                parse_address(text),
                tls_cert=config.proto_tls_cert,
                tls_key=config.proto_tls_key,
                insecure_plaintext=config.insecure_plaintext,
            )
        except (ValueError, OSError) as error:
            for listener in listeners:
                await trio.aclose_forcefully(listener)
            raise StartError(f"cannot listen on {text}: {error}") from error
    return listeners


async def _beat(services: Services, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """This instance lives. One that was succeeded ends; a restart gives it a new identity."""
    task_status.started()
    while True:
        await trio.sleep(BEAT_SECS)
        now = services.clock.now()
        if not await services.database.run(partial(beat_instance, instance_id=services.instance_id, now=now)):
            raise RuntimeError("another instance took over what this one owned; start it again")


async def _farewell(services: Services) -> None:
    """Nothing new; everyone is told; what has arrived is committed; sessions end with their last words."""
    services.scheduler.drain()
    services.draining.set()
    for session in services.sessions:
        session.send(Draining(reason="the server is stopping"))
    with trio.move_on_after(STOP_SECS):
        for session in services.sessions:
            await session.worked_off()
        for session in services.sessions:
            session.end("the server is stopping")
        for session in services.sessions:
            await session.done.wait()
