"""Downloads the file of a `fixed_output` (messages.md, Shapes, Job), whose SHA-256 the job names.

`http:` and `https:` URLs, and `file:` for what every user of the host may read: the agent could read
more, its own tokens among it, than the author of a recipe is to see.

What can be another minute's luck (a server that does not answer) is Transient; what will be the same
next time (a wrong hash, a file that is not there) is Permanent.
"""

import hashlib
import stat
import urllib.parse
from functools import partial
from pathlib import Path
from typing import IO, Final

import trio
from gradient_protocol.kinds import FailureKind
from gradient_protocol.limits import TRANSFER_STALL_SECS
from gradient_protocol.messages.shapes import FixedOutput

from gradient_worker.executor.failure import Failure, failure
from gradient_worker.threads import Threads

__all__ = ["download_file"]

CHUNK_BYTES: Final = 256 * 1024
MAX_REDIRECTS: Final = 10
NOT_YOUR_TURN: Final = (408, 425, 429)
"""Answers that ask to come again, unlike the other 400s."""


async def download_file(
    fixed: FixedOutput, target: Path, threads: Threads, *, timeout_secs: float
) -> int | Failure:
    """Put the file at `target`. Returns its size in bytes."""
    scheme = urllib.parse.urlsplit(fixed.url).scheme
    hasher = hashlib.sha256()
    outcome: int | Failure = failure(FailureKind.TIMEOUT, f"downloading took longer than {timeout_secs:g} s")
    await threads.run(lambda: target.parent.mkdir(parents=True, exist_ok=True))
    with trio.move_on_after(timeout_secs):
        if scheme == "file":
            outcome = await threads.run(lambda: _copy(fixed.url, target, hasher))
        elif scheme in ("http", "https"):
            outcome = await _fetch(fixed.url, target, hasher, threads)
        else:
            return failure(
                FailureKind.PERMANENT, f"cannot download {_shown(fixed.url)}: use file, http or https"
            )
    if isinstance(outcome, Failure):
        return outcome
    found = hasher.hexdigest()
    if found != fixed.sha256.lower():
        text = f"{_shown(fixed.url)} has SHA-256 {found}, the recipe says {fixed.sha256}"
        return failure(FailureKind.PERMANENT, text)
    return outcome


def _copy(url: str, target: Path, hasher: "hashlib._Hash") -> int | Failure:
    try:
        # Resolved, so that what is judged is what is opened.
        source = Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path)).resolve(strict=True)
        if not _is_for_everybody(source):
            text = f"cannot download {_shown(url)}: it is no file that every user of the host may read"
            return failure(FailureKind.PERMANENT, text)
        opened = source.open("rb")
    except (OSError, RuntimeError, ValueError) as error:  # none there, symlinks in a circle, a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        return failure(FailureKind.PERMANENT, f"cannot download {_shown(url)}: {reason}")
    with opened, target.open("wb") as written:
        return _pour(opened, written, hasher)


def _is_for_everybody(file: Path) -> bool:
    mode = file.stat().st_mode
    return (
        stat.S_ISREG(mode)
        and bool(mode & stat.S_IROTH)
        and all(parent.stat().st_mode & stat.S_IXOTH for parent in file.parents)
    )


def _pour(source: IO[bytes], target: IO[bytes], hasher: "hashlib._Hash") -> int:
    size = 0
    while chunk := source.read(CHUNK_BYTES):
        hasher.update(chunk)
        target.write(chunk)
        size += len(chunk)
    return size


async def _fetch(url: str, target: Path, hasher: "hashlib._Hash", threads: Threads) -> int | Failure:
    import httpx2  # noqa: PLC0415 - costs a worker that downloads nothing 10 MiB

    try:
        async with (
            httpx2.AsyncClient(
                follow_redirects=True, max_redirects=MAX_REDIRECTS, timeout=TRANSFER_STALL_SECS
            ) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != 200:
                permanent = 400 <= answer.status_code < 500 and answer.status_code not in NOT_YOUR_TURN
                kind = FailureKind.PERMANENT if permanent else FailureKind.TRANSIENT
                return failure(
                    kind, f"cannot download {_shown(url)}: the server answered {answer.status_code}"
                )
            size = 0
            with target.open("wb") as written:
                async for chunk in answer.aiter_bytes(CHUNK_BYTES):
                    hasher.update(chunk)
                    await threads.run(partial(written.write, chunk))
                    size += len(chunk)
            return size
    except httpx2.HTTPError as error:
        text = f"cannot download {_shown(url)}: {type(error).__name__} {error}".rstrip()
        return failure(FailureKind.TRANSIENT, text)
    except httpx2.InvalidURL as error:
        return failure(FailureKind.PERMANENT, f"cannot download {_shown(url)}: {error}")


def _shown(url: str) -> str:
    """A URL for people: user names, passwords and queries may be secrets."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))
