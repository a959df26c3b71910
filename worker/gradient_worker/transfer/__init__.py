"""Moves NARs between the store and the server (protocol.md, "Transfers").

A download that the session's end cut goes on with the next one, from the first byte that was not
taken in. An upload goes on under the same request id from the offset that the server grants: its
bytes are made anew, for the same store path compresses to the same bytes, and those the server has
are not sent again. Packing, compression and hashing run in threads, a few hundred KiB at a time,
never a whole NAR in memory.
"""

from typing import Final

import structlog
import trio
from gradient_protocol.errors import SessionClosed
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import SpanKind

from gradient_worker.executor.spans import SpanLog
from gradient_worker.meters import host
from gradient_worker.stores.base import PathInfo, Store
from gradient_worker.threads import Few, Threads
from gradient_worker.transfer.download import Download
from gradient_worker.transfer.outcomes import Again, Downloaded, Lost, Refused, Stalled, Uploaded
from gradient_worker.transfer.upload import Upload
from gradient_worker.wire import Link

__all__ = ["Downloaded", "Lost", "Refused", "Stalled", "Transfers", "Uploaded"]

MAX_TRIES: Final = 3
"""Of one transfer that stalls, arrives damaged or is to start again; a lost session is no try."""

logger = structlog.get_logger(__name__)


class Transfers:
    """Downloads and uploads over whatever session there is."""

    def __init__(self, *, link: Link, store: Store, threads: Threads, ids: IdSource) -> None:
        self._link = link
        self._store = store
        # More threads than processors only wait for each other: unpacking is many short system calls.
        self._threads = Few(threads, max(2, host.cpu_count()))
        self._ids = ids

    async def download(
        self, assignment_id: str, path: str, nar_hash: str | None, spans: SpanLog
    ) -> Downloaded | Lost | Stalled:
        """Fetch a path into the store. `nar_hash`: what the job says it must be, where it says so.

        StoreError where this worker cannot store it.
        """
        download = Download(
            store=self._store,
            threads=self._threads,
            ids=self._ids,
            assignment_id=assignment_id,
            path=path,
            nar_hash=nar_hash,
        )
        started = spans.now()
        try:
            outcome = await self._until_it_ends(download)
        finally:
            await download.aclose()
        if isinstance(outcome, Downloaded):
            spans.add(
                SpanKind.NAR_FETCH,
                started,
                nar_bytes=outcome.info.nar_size,
                stored_bytes=outcome.stored_bytes,
                paths=1,
            )
        return outcome

    async def _until_it_ends(self, download: Download) -> Downloaded | Lost | Stalled:
        tries = 0
        while True:
            before = download.received
            outcome = await self._download_on_some_wire(download)
            if isinstance(outcome, Downloaded) or (isinstance(outcome, Lost) and not outcome.damaged):
                return outcome
            logger.warning("download failed", path=download.path, outcome=repr(outcome))
            if isinstance(outcome, Stalled) and download.received > before:
                tries = 0  # there is a deadline on progress, and none on the whole
            tries += 1
            if tries == MAX_TRIES:
                return outcome
            if isinstance(outcome, Lost):
                await download.aclose()

    async def _download_on_some_wire(self, download: Download) -> Downloaded | Lost | Stalled:
        while True:
            wire = await self._link.wire()
            try:
                return await download.run_on(wire)
            except SessionClosed:
                await trio.lowlevel.checkpoint()

    async def upload(self, assignment_id: str, info: PathInfo, spans: SpanLog) -> Uploaded | Refused:
        """Send a path of the store to the server, until it is committed or skipped."""
        for _ in range(MAX_TRIES):
            request_id = self._ids.new()
            outcome = await self._upload_on_some_wire(request_id, assignment_id, info, spans)
            if not isinstance(outcome, Again):
                return outcome
            logger.warning("upload starts again", path=info.path, why=outcome.value)
        return Refused(info.path, f"not uploaded in {MAX_TRIES} tries")

    async def _upload_on_some_wire(
        self, request_id: str, assignment_id: str, info: PathInfo, spans: SpanLog
    ) -> "Uploaded | Refused | Again":
        zstd: bool | None = None
        while True:
            wire = await self._link.wire()
            if zstd is not None and wire.zstd is not zstd:
                return Again.RETRY  # the bytes of one request id never change
            zstd = wire.zstd
            upload = Upload(
                wire,
                store=self._store,
                threads=self._threads,
                request_id=request_id,
                assignment_id=assignment_id,
                info=info,
                spans=spans,
            )
            try:
                return await upload.run()
            except SessionClosed:
                await trio.lowlevel.checkpoint()
