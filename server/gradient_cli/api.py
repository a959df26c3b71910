"""The server's HTTP API, as the commands use it.

Every failure becomes a `CommandError` of one line: the server's own words where it gave some.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx2

from gradient_cli.errors import CommandError, ExitCode

__all__ = ["DEFAULT_URL", "Api", "Event", "part"]

DEFAULT_URL = "http://127.0.0.1:3000"
CONNECT_SECS = 10.0
# Answers come from memory or one database query; an upload's answer follows its verification.
ANSWER_SECS = 60.0
# The snapshot of an evaluation of 20,000 builds.
MAX_EVENT_BYTES = 64 * 1024 * 1024

Json = dict[str, Any]
Event = tuple[str, Json]


def _read_key(key_file: Path) -> str:
    try:
        text = key_file.read_text().strip()
    except OSError as error:
        raise CommandError(
            f"cannot read the API key file {key_file}: {error.strerror}; set GRADIENT_API_KEY_FILE",
            ExitCode.USAGE,
        ) from None
    if not text:
        raise CommandError(f"the API key file {key_file} is empty", ExitCode.USAGE)
    return text


def part(text: str) -> str:
    """A name as one part of a path, whatever characters it has; what is no UTF-8 names nothing there."""
    return quote(text, safe=":", errors="backslashreplace")


class Api:
    """A client for one server. Use it as a context manager."""

    def __init__(self, url: str, key_file: Path | None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {_read_key(key_file)}"} if key_file else {}
        self._client = httpx2.Client(
            base_url=f"{self.url}/api/v1",
            headers=headers,
            timeout=httpx2.Timeout(ANSWER_SECS, connect=CONNECT_SECS),
            # The server is named by its own address; a proxy of the environment is not asked.
            trust_env=False,
        )

    @classmethod
    def from_environment(cls, url: str | None = None, key_file: Path | None = None) -> Self:
        """`GRADIENT_URL` and `GRADIENT_API_KEY_FILE`, unless given."""
        named = os.environ.get("GRADIENT_API_KEY_FILE")
        if key_file is None and named:
            key_file = Path(named)
        return cls(url or os.environ.get("GRADIENT_URL") or DEFAULT_URL, key_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **query: str | int | None) -> Json:
        """The JSON at `path`."""
        return self._call("GET", path, query=query)

    def post(self, path: str, body: Json | None = None) -> Json:
        """What the server answers to `body`."""
        return self._call("POST", path, body=body or {})

    def put(self, path: str, body: Json) -> Json:
        """What the server answers to `body`, put at `path`."""
        return self._call("PUT", path, body=body)

    def find(self, path: str, **query: str | int | None) -> Json | None:
        """The JSON at `path`, None where the server knows nothing there."""
        with self._errors():
            answer = self._client.get(path, params=_without_none(query))
        return None if answer.status_code == httpx2.codes.NOT_FOUND else self._checked(answer)

    def upload(self, path: str, chunks: Iterable[bytes], **query: str | int | None) -> Json:
        """Streams `chunks` as the body of a PUT."""
        with self._errors():
            answer = self._client.put(path, params=_without_none(query), content=chunks)
        return self._checked(answer)

    def events(self, path: str) -> Iterator[Event]:
        """The server-sent events at `path`, as (name, data), until the server ends the stream."""
        timeout = httpx2.Timeout(ANSWER_SECS, connect=CONNECT_SECS)
        with self._errors(), self._client.stream("GET", path, timeout=timeout) as answer:
            if answer.is_error:
                answer.read()
                self._checked(answer)
            for event in httpx2.EventSource(answer, MAX_EVENT_BYTES):
                yield event.event, json.loads(event.data)

    def stream(self, path: str, **query: str | int | None) -> Iterator[bytes]:
        """The body at `path`, as it comes. A followed log may be silent for as long as a build."""
        timeout = httpx2.Timeout(None, connect=CONNECT_SECS)
        with (
            self._errors(),
            self._client.stream("GET", path, params=_without_none(query), timeout=timeout) as answer,
        ):
            if answer.is_error:
                answer.read()
                self._checked(answer)
            yield from answer.iter_bytes()

    def _call(
        self, method: str, path: str, *, query: dict[str, Any] | None = None, body: Json | None = None
    ) -> Json:
        with self._errors():
            answer = self._client.request(method, path, params=_without_none(query or {}), json=body)
        return self._checked(answer)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx2.ConnectError:
            raise CommandError(
                f"no server answers at {self.url}: start gradient-server, or set GRADIENT_URL"
            ) from None
        except httpx2.TimeoutException:
            raise CommandError(f"the server at {self.url} did not answer in time: try again") from None
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol):
            raise CommandError(
                f"{self.url!r} is not an address: write http://host:port in GRADIENT_URL", ExitCode.USAGE
            ) from None
        except UnicodeEncodeError:
            raise CommandError("what you named is no UTF-8 text: name it otherwise", ExitCode.USAGE) from None
        except httpx2.TransportError as error:
            raise CommandError(f"the connection to {self.url} broke: {error}; try again") from None

    def _checked(self, answer: httpx2.Response) -> Json:
        try:
            content = answer.json()
        except ValueError:
            content = None
        if answer.is_success and isinstance(content, dict):
            return content
        told = content.get("error") if isinstance(content, dict) else None
        if answer.status_code == httpx2.codes.UNAUTHORIZED and not told:
            told = (
                "an API key is needed: set GRADIENT_API_KEY_FILE to the file the server printed at its start"
            )
        raise CommandError(told or f"{self.url} answered {answer.status_code}: is it a gradient-server?")


def _without_none(query: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}
