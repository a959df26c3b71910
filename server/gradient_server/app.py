"""The one place that wires the server together: `serve`, `migrate` and `check`.

Start: base directory, database (locked, migrated), what this instance owned before, what is
pending, then listeners and loops in one nursery. Any loop that fails ends the process, with its
error in the log; a stop is graceful and loses nothing (operations.md, "Signals").
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, cast

import sqlalchemy as sa
import structlog
import trio
from gradient_protocol.address import (
    TlsAddress,
    listener_address,
    open_listeners,
    parse_address,
    server_context,
)
from gradient_protocol.ids import IdSource
from gradient_protocol.notify import Notifier

from gradient_server import first_start, service
from gradient_server.clock import SystemClock
from gradient_server.cluster import matching
from gradient_server.config import ServerConfig
from gradient_server.db.errors import DatabaseError
from gradient_server.db.migrate import Migration, current_revision, newest_revision
from gradient_server.db.migrate import migrate as migrate_database
from gradient_server.db.queries.claims import open_assignments
from gradient_server.db.queries.instances import database_now, register_instance, stop_instance, take_over
from gradient_server.db.runner import Database, open_database
from gradient_server.graph.jobs import load_pending
from gradient_server.http_server import serve_http
from gradient_server.net.farewell import farewell
from gradient_server.net.listener import Door
from gradient_server.net.services import Services
from gradient_server.storage.durable import StorageError
from gradient_server.storage.retention import FIRST_PASS_SECS
from gradient_server.web.app import create_app
from gradient_server.wiring import build_services, make_ids, tune_interpreter

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework

__all__ = ["StartError", "check", "migrate", "run_server", "serve"]

log = structlog.get_logger(__name__)

E = TypeVar("E", bound=Exception)

# Of a server that nobody but its tests, or its terminal, watches.
UNWATCHED: Final = Notifier(None)


class StartError(Exception):
    """Why the server cannot start: one line that says what to do."""


async def migrate(config: ServerConfig) -> str:
    """Brings the database to this version's schema; a line that says what was done."""
    with _start_errors():
        first_start.prepare(config.base_dir)
        done = await _migrate(config)
    if done.changed:
        return f"migrated from {done.before or 'an empty database'} to {done.after}"
    return f"nothing to do: the database is at {done.after}"


async def _migrate(config: ServerConfig) -> Migration:
    return await trio.to_thread.run_sync(migrate_database, config.database_url)


async def check(config: ServerConfig) -> list[str]:
    """What is wrong with configuration and database, a line each; changes nothing."""
    problems: list[str] = []
    for address in config.proto_listen:
        try:
            parsed = parse_address(address)
            if isinstance(parsed, TlsAddress):
                server_context(parsed, config.proto_tls_cert, config.proto_tls_key)
        except (ValueError, OSError) as error:
            problems.append(f"proto.listen: {error}")
    if not config.base_dir.is_dir():
        problems.append(f"baseDir: {config.base_dir} does not exist; `gradient-server serve` makes it")
        return problems
    problem: str | None = None
    try:
        async with open_database(config.database_url) as database:
            revision = await database.read(current_revision)
        if revision != newest_revision():
            problem = "the database is not at this version's schema: run gradient-server migrate"
    except DatabaseError as error:
        problem = str(error)
    return problems + ([problem] if problem else [])


async def serve(config: ServerConfig) -> int:
    """Runs the server until a signal; the process's exit code."""
    tune_interpreter()
    notifier = Notifier.take(os.environ, os.getpid())
    stop = trio.Event()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_signals, stop)
            await run_server(config, stop, notifier=notifier)
            nursery.cancel_scope.cancel()
    # Not except*: what is raised inside one comes out in a group again on some versions of Python.
    except ExceptionGroup as group:
        found = _first(group, StartError)
        if found is not None:
            raise found from None
        log.error("a loop failed: the server ends", exc_info=group)
        return 1
    return 0


def _first(group: ExceptionGroup[Exception], kind: type[E]) -> E | None:
    """The first error of that kind, where the group holds nothing else."""
    matched, rest = group.split(kind)
    if matched is None or rest is not None:
        return None
    error: BaseException = matched
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, kind) else None


async def _watch_signals(stop: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        async for number in received:
            if stop.is_set():
                log.warning("a second signal: ending at once")
                raise SystemExit(128 + number)
            log.info("stopping", signal=signal.Signals(number).name)
            stop.set()


@contextmanager
def _start_errors() -> Iterator[None]:
    """What keeps a server from starting, as one line."""
    try:
        yield
    except (DatabaseError, StorageError) as error:
        raise StartError(str(error)) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise StartError(f"{error.filename}: {error.strerror}; set baseDir to a place of your own") from error


def _tell(line: str) -> None:
    """At once, for whoever started us may read from a pipe and wait for it."""
    print(line, flush=True)  # noqa: T201 - what `serve` is to print


async def run_server(
    config: ServerConfig,
    stop: trio.Event,
    *,
    announce: Callable[[str], None] = _tell,
    notifier: Notifier = UNWATCHED,
    task_status: trio.TaskStatus[Services] = trio.TASK_STATUS_IGNORED,
) -> None:
    """The whole server, from its database to its last farewell; ends soon after `stop` is set.

    `announce` gets one line for each address, and one for the first API key; `notifier` tells the
    service manager. Started with the services once it listens. StartError where it cannot start; what
    a loop raises ends it.
    """
    with _start_errors():
        first_start.prepare(config.base_dir)
        service.announce_work(notifier, "migrating the database")
        await _migrate(config)
        database = await Database.open(config.database_url)
    try:
        await _run(config, database, stop, announce=announce, notifier=notifier, task_status=task_status)
    finally:
        await database.aclose()
    log.info("stopped")


async def _run(
    config: ServerConfig,
    database: Database,
    stop: trio.Event,
    *,
    announce: Callable[[str], None],
    notifier: Notifier,
    task_status: trio.TaskStatus[Services],
) -> None:
    ids = make_ids()
    instance_id = await _enter(config, database, ids)
    with _start_errors():
        services = build_services(config, database, ids, instance_id)
    now = services.clock.now()
    service.announce_work(notifier, "loading what waits")
    await services.clusters.load()
    services.scheduler.load(await database.read(lambda connection: load_pending(connection, None, now)))
    owned = await database.read(lambda connection: open_assignments(connection, instance_id=instance_id))
    listeners = await _listen(config)
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as loops:
            await _start_loops(services, loops)
            loops.start_soon(Door(services).run, listeners, connections)
            away = [assignment.worker_id for assignment in owned]
            for worker_id in dict.fromkeys([*away, *services.clusters.awaited_workers()]):
                services.graces.arm(worker_id)
            await loops.start(services.sweeps.run)
            http_addresses = await _start_http(services, loops)
            # The last thing that can fail: a start that fails before it has made no key, whose file
            # the next one would not name.
            with _start_errors():
                await _make_keys(config, database, ids, announce)
            for listener in listeners:
                announce(f"workers: {listener_address(listener)}")
            for address in http_addresses:
                announce(f"http: {address}")
            await service.tell_ready(notifier, services, loops)
            loops.start_soon(trio.to_thread.run_sync, matching.load)
            task_status.started(services)
            await stop.wait()
            service.announce_stop(notifier)
            await farewell(services)
            database.end_patience()
            loops.cancel_scope.cancel()
        connections.cancel_scope.cancel()
    services.logs.close()
    await database.run(partial(stop_instance, instance_id=instance_id, now=services.clock.now()))


async def _start_loops(services: Services, loops: trio.Nursery) -> None:
    await loops.start(services.scheduler.run)
    await loops.start(services.clusters.run)
    await loops.start(services.history.run)
    await loops.start(services.windows.run)
    await loops.start(services.graces.run)
    await loops.start(services.uploads.run)
    await loops.start(partial(services.retention.run, first_after_secs=FIRST_PASS_SECS))
    await loops.start(services.succession.run)


async def _start_http(services: Services, loops: trio.Nursery) -> list[str]:
    host, port = services.settings.listen_addr, services.settings.port
    # Starlette and hypercorn describe the same protocol with types of their own.
    asgi = cast("ASGIFramework", create_app(services))
    serve = partial(serve_http, asgi, host=host, port=port, stopping=services.draining)
    try:
        addresses: list[str] = await loops.start(serve)
    except OSError as error:
        raise StartError(f"cannot listen on http://{host}:{port}: {error}") from error
    except ExceptionGroup as group:
        found = _first(group, OSError)
        if found is None:
            raise
        raise StartError(f"cannot listen on http://{host}:{port}: {found}") from found
    return addresses


async def _make_keys(
    config: ServerConfig, database: Database, ids: IdSource, announce: Callable[[str], None]
) -> None:
    now = SystemClock().now()
    file = await database.run(
        lambda connection: first_start.make_first_key(connection, config.base_dir, now=now, ids=ids)
    )
    if file is not None:
        announce(f"api key: {file}")


async def _enter(config: ServerConfig, database: Database, ids: IdSource) -> str:
    """Registers this instance; under a new id where another one took over what it owned."""
    instance_id = first_start.instance_id(config.base_dir, ids)
    url = config.proto_advertise_url

    def register(connection: sa.Connection) -> bool:
        # By the clock that all instances share, as every beat is.
        return register_instance(connection, instance_id, advertise_url=url, now=database_now(connection))

    while not await database.run(register):
        instance_id = ids.new()
        first_start.replace_instance_id(config.base_dir, instance_id)
    now = SystemClock().now()
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
