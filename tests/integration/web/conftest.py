"""A server's HTTP side on loopback, as clients find it."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
import structlog
import trio
from fastapi import FastAPI
from gradient_server.db.queries.registry import create_api_key, create_project
from gradient_server.db.runner import Database
from gradient_server.http_server import serve_http
from gradient_server.net.services import Services
from gradient_server.web.app import create_app
from gradient_server.web.state import Web

from tests.fakes.pool import Pool, running_pool

Json = dict[str, Any]


@dataclass
class Site:
    """`client` has a key for everything, `reader` has none, `bound` one of the project `mine`."""

    pool: Pool
    app: FastAPI
    url: str
    client: httpx2.AsyncClient
    reader: httpx2.AsyncClient
    bound: httpx2.AsyncClient
    nursery: trio.Nursery

    @property
    def services(self) -> Services:
        return self.pool.services

    @property
    def web(self) -> Web:
        found = self.app.state.web
        assert isinstance(found, Web)
        return found

    @asynccontextmanager
    async def events(self, evaluation: str) -> AsyncIterator[AsyncIterator[tuple[str, Json]]]:
        """The evaluation's events, as (name, data)."""
        async with self.reader.stream("GET", f"/evaluations/{evaluation}/events") as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            async with aclosing(_events(answer)) as stream:
                yield stream


async def _events(answer: httpx2.Response) -> AsyncGenerator[tuple[str, Json], None]:
    async for event in httpx2.EventSource(answer):
        yield event.event, event.json()


def client(url: str, key: str | None) -> httpx2.AsyncClient:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    settings: Json = {"timeout": 20.0, "trust_env": False, "verify": False}
    return httpx2.AsyncClient(base_url=f"{url}/api/v1", headers=headers, **settings)


@pytest.fixture
def plain_logs() -> Iterator[None]:
    """Lines as the server writes them: with every local variable of a request they take seconds."""
    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    yield
    structlog.configure(**before)


@pytest.fixture
async def site(plain_logs: None, sqlite_database: Database, tmp_path: Path) -> AsyncIterator[Site]:
    async with running_pool(sqlite_database, tmp_path / "server") as pool:
        services = pool.services

        def keys(connection: sa.Connection) -> tuple[str, str]:
            now, ids = services.clock.now(), services.ids
            mine = create_project(connection, "mine", now=now, ids=ids)
            return (
                create_api_key(connection, "all", None, now=now, ids=ids),
                create_api_key(connection, "bound", mine, now=now, ids=ids),
            )

        key, bound_key = await services.database.run(keys)
        async with trio.open_nursery() as nursery:
            app = create_app(services)
            serve = partial(serve_http, app, host="127.0.0.1", port=0, stopping=services.draining)
            (url,) = await nursery.start(serve)
            async with client(url, key) as all_, client(url, None) as reader, client(url, bound_key) as bound:
                yield Site(pool, app, url, all_, reader, bound, nursery)
            nursery.cancel_scope.cancel()
