"""NARs on their way in: requests, grants, bytes, the commit (protocol.md, Transfers).

Who may send and when is `admission`'s decision, what bytes are and whether they are good the NAR
store's; here they meet the sessions and the database. Bytes are stored in threads, in the lane of
their request (net/lanes.py), and acknowledged once they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio
from gradient_protocol.errors import ProtocolError
from gradient_protocol.kinds import Compression, UploadOutcome
from gradient_protocol.limits import TRANSFER_STALL_SECS
from gradient_protocol.messages.common import BulkAck, Message
from gradient_protocol.messages.server import Relay, Skip, UploadCommitted, UploadGrant
from gradient_protocol.messages.worker import UploadCancel, UploadChunk, UploadFinished, UploadRequest
from gradient_protocol.nar import NarError

from gradient_server.storage import admission
from gradient_server.storage.nar_store import (
    NarWriter,
    StorageError,
    StoredObject,
    UploadGapError,
    WriterClosedError,
)
from gradient_server.storage.orphans import delete_unused
from gradient_server.storage.upload_rows import Answer, UploadRows, unfit_references

if TYPE_CHECKING:
    from gradient_server.net.services import Services
    from gradient_server.net.session import Session

__all__ = ["Uploads"]

log = structlog.get_logger(__name__)

_LOOK_EVERY_SECS: Final = 5.0
# Of what an earlier session left, verified in one trip to a thread.
_CATCH_UP_BYTES: Final = 32 * 1024 * 1024
# What an upload may have over its announced size: it is an estimate, and zstd may add a little.
_ROOM_BYTES: Final = 1024 * 1024
_BAD_REQUEST: Final = 400
_TOO_MANY: Final = 413


@dataclass(slots=True, eq=False)
class _Upload:
    """A request that waits or runs in a session. `writer` is open from the grant on.

    `is_new`: nobody has sent a byte of it.
    """

    session: "Session"
    request: UploadRequest
    is_member: bool
    is_new: bool
    writer: NarWriter | None = None
    last_byte_at: float = 0.0
    finishing: bool = False


class Uploads:
    """All uploads of the server, by request id."""

    def __init__(self, services: "Services") -> None:
        self._services = services
        settings = services.settings
        self._lease_secs = settings.upload_lease_idle_secs
        self._admission = admission.UploadAdmission(
            concurrency=settings.upload_concurrency,
            bytes_budget=settings.upload_bytes_budget,
            lease_idle_secs=settings.upload_lease_idle_secs,
        )
        self._rows = UploadRows(services)
        self._active: dict[str, _Upload] = {}
        self._disk = trio.CapacityLimiter(4)
        # For /metrics: bytes as they travelled.
        self.bytes_received = 0

    @property
    def running(self) -> int:
        """Slots in use."""
        return self._admission.granted

    @property
    def waiting(self) -> int:
        """Requests without a decision."""
        return self._admission.waiting

    def takes(self, session: "Session", request_id: str) -> bool:
        """Whether bytes of this request are to be stored; others are ignored."""
        return self._granted(session, request_id) is not None

    # What workers ask

    async def request(self, session: "Session", messages: Sequence[UploadRequest]) -> None:
        """Answers at once where the answer is known, else when it is the request's turn.

        One of an assignment that the worker does not have is ignored. ProtocolError 413 for too many.
        """
        found = [(session.held(message.assignment_id), message) for message in messages]
        requests = [(held, message) for held, message in found if held is not None]
        if not requests:
            return
        lease_until = self._services.clock.now() + self._lease_secs
        answers = await self._rows.start(session.worker_id, requests, lease_until)
        for (held, message), answer in zip(requests, answers, strict=True):
            self._answer_request(session, message, answer, is_member=held.is_member)

    def _answer_request(
        self, session: "Session", message: UploadRequest, answer: Answer, *, is_member: bool
    ) -> None:
        if answer is Answer.HELD:
            session.send(UploadGrant(request_id=message.request_id, target=Skip()))
        elif answer is Answer.COMMITTED:
            self._answer(session, message.request_id, UploadOutcome.OK)
        elif answer is Answer.NOT_ITS_OUTPUT:
            reason = f"{message.path} is no output of this job"
            self._answer(session, message.request_id, UploadOutcome.REJECTED, reason)
        elif answer is Answer.REUSED:
            reason = "the request id was used for another upload"
            self._answer(session, message.request_id, UploadOutcome.REJECTED, reason)
        else:
            self._ask(session, message, is_member=is_member, is_new=answer is Answer.NEW)

    def _ask(self, session: "Session", message: UploadRequest, *, is_member: bool, is_new: bool) -> None:
        known = self._active.get(message.request_id)
        if known is not None and known.session is session:
            return  # asked twice: the grant is sent, or will be
        self._active[message.request_id] = _Upload(session, message, is_member, is_new)
        try:
            decisions = self._admission.request(
                session,
                message.request_id,
                message.path,
                message.size_estimate,
                self._now(),
                may_skip=not is_member,
            )
        except admission.AdmissionError as error:
            raise ProtocolError(_TOO_MANY, str(error)) from error
        self._carry_out(decisions)

    async def cancel(self, session: "Session", request_id: str) -> None:
        """The worker gave it up; nothing of it is kept."""
        upload = self._active.get(request_id)
        if upload is None or upload.session is not session or upload.finishing:
            return
        await self._give_up(upload)

    async def session_ended(self, session: "Session") -> None:
        """Slots are free at once; what arrived is kept for its lease."""
        own = [upload for upload in self._active.values() if upload.session is session]
        for upload in own:
            del self._active[upload.request.request_id]
        # Those that waited for their slot, too: an earlier session may have sent some of it.
        kept = [upload.request.request_id for upload in own]
        self._carry_out(self._admission.session_ended(session, self._now()))
        for upload in own:
            if upload.writer is not None:
                await trio.to_thread.run_sync(upload.writer.close, limiter=self._disk)
        if kept:
            await self._rows.extend(kept, self._services.clock.now() + self._lease_secs)

    # Decisions

    def _carry_out(self, decisions: Iterable[admission.Decision]) -> None:
        for decision in decisions:
            upload = self._active.get(decision.request_id)
            if upload is None or upload.session is not decision.session:
                continue
            if isinstance(decision, admission.Grant):
                if upload.is_new and upload.writer is None:
                    upload.writer = self._make_writer(upload)  # touches no disk
                    self._grant(upload, upload.writer)
                else:
                    upload.session.start_soon(partial(self._open, upload))
            elif isinstance(decision, admission.Skip):
                del self._active[decision.request_id]
                upload.session.send(UploadGrant(request_id=decision.request_id, target=Skip()))
            else:
                upload.session.start_soon(partial(self._stalled, upload))

    async def _open(self, upload: _Upload) -> None:
        """It is the upload's turn: say from where."""
        request_id = upload.request.request_id
        if upload.writer is None:
            try:
                writer = await self._open_writer(upload)
            except StorageError as error:
                await self._reject(upload, str(error))
                return
            except NarError as error:
                await self._start_again(upload, f"what had come of it is damaged: {error}")
                return
            if self._active.get(request_id) is not upload:
                writer.close()
                return
            upload.writer = writer
        self._grant(upload, upload.writer)

    def _grant(self, upload: _Upload, writer: NarWriter) -> None:
        upload.last_byte_at = self._now()
        grant = UploadGrant(request_id=upload.request.request_id, target=Relay(offset=writer.offset))
        upload.session.send(grant)

    def _make_writer(self, upload: _Upload) -> NarWriter:
        announced = max(0, upload.request.size_estimate)
        return self._services.nar_store.open_writer(
            upload.request.request_id,
            max_bytes=announced + announced // 8 + _ROOM_BYTES,
            compression=_compression(upload.session),
            is_new=upload.is_new,
        )

    async def _open_writer(self, upload: _Upload) -> NarWriter:
        """Ready to append; what an earlier session left is verified. StorageError, NarError."""
        writer = await trio.to_thread.run_sync(self._make_writer, upload, limiter=self._disk)
        try:
            caught_up = False
            while not caught_up:
                caught_up = await trio.to_thread.run_sync(
                    writer.catch_up, _CATCH_UP_BYTES, limiter=self._disk
                )
        except WriterClosedError:
            pass  # somebody else took the request over, or gave it up: the caller finds that out
        except BaseException:
            writer.close()
            raise
        return writer

    # Bytes

    async def store(self, session: "Session", messages: Sequence[Message]) -> None:
        """What came in one lane of a session: requests and cancels of uploads, or the bytes of one.

        ProtocolError 400 for a gap, 413 for too many requests.
        """
        if isinstance(messages[0], UploadChunk | UploadFinished):
            await self._store_bytes(session, messages, messages[0].request_id)
            return
        requests: list[UploadRequest] = []
        for message in messages:
            if isinstance(message, UploadRequest):
                requests.append(message)
            elif isinstance(message, UploadCancel):
                await self.request(session, requests)
                requests = []
                await self.cancel(session, message.request_id)
        await self.request(session, requests)

    async def _store_bytes(self, session: "Session", messages: Sequence[Message], request_id: str) -> None:
        """In order; acknowledged together."""
        upload = self._granted(session, request_id)
        if upload is None or upload.writer is None:
            return
        try:
            chunks = [message for message in messages if isinstance(message, UploadChunk)]
            if isinstance(messages[-1], UploadFinished):
                await self._finish(upload, upload.writer, chunks, messages[-1])
            else:
                append = partial(_append, upload.writer, chunks)
                self._appended(upload, chunks, await trio.to_thread.run_sync(append, limiter=self._disk))
        except WriterClosedError:
            log.debug("bytes of an upload that was given up", request=request_id)
        except UploadGapError as error:
            raise ProtocolError(_BAD_REQUEST, f"upload {request_id}: {error}") from error
        except (NarError, StorageError) as error:
            await self._reject(upload, str(error))

    def _appended(self, upload: _Upload, chunks: Sequence[UploadChunk], offset: int) -> None:
        if chunks:
            self.bytes_received += sum(len(chunk.data) for chunk in chunks)
            upload.last_byte_at = self._now()
            self._admission.progress(upload.request.request_id, self._now())
            upload.session.send(BulkAck(id=upload.request.request_id, offset=offset))

    async def _finish(
        self, upload: _Upload, writer: NarWriter, chunks: Sequence[UploadChunk], message: UploadFinished
    ) -> None:
        """Verify, make object and row durable, and only then say so.

        The last chunks come along: a small upload is one trip to a thread, and one write to the worker.
        """
        unfit = unfit_references(message.references)
        if unfit is not None:
            await self._reject(upload, unfit)
            return
        upload.finishing = True
        finish = partial(
            writer.finish, message.nar_hash, message.nar_size, message.file_size, _compression(upload.session)
        )

        def work() -> tuple[int, StoredObject]:
            return _append(writer, chunks), finish()

        # From here on it is finished whatever becomes of the session: a repeated request finds it so.
        with trio.CancelScope(shield=True):
            offset, stored = await trio.to_thread.run_sync(work, limiter=self._disk)
            try:
                replaced = await self._rows.commit(
                    upload.request, stored, message.references, is_member=upload.is_member
                )
            finally:
                self._services.nar_store.settle(stored.object)
            self._appended(upload, chunks, offset)
            self._end(upload, committed=not upload.is_member)
            self._answer(upload.session, message.request_id, UploadOutcome.OK)
            if replaced is not None:
                await self._delete_replaced(replaced)

    async def _delete_replaced(self, name: str) -> None:
        try:
            await delete_unused(self._services, name)
        except StorageError as error:  # the hourly look for orphans finds it again
            log.error("a replaced object cannot be removed", object=name, reason=str(error))

    # Ends

    async def _reject(self, upload: _Upload, reason: str) -> None:
        log.warning("an upload is rejected", path=upload.request.path, reason=reason)
        await self._give_up(upload)
        self._answer(upload.session, upload.request.request_id, UploadOutcome.REJECTED, reason)

    async def _stalled(self, upload: _Upload) -> None:
        await self._start_again(upload, f"no byte came for {TRANSFER_STALL_SECS:g} s")

    async def _start_again(self, upload: _Upload, reason: str) -> None:
        log.warning("an upload is given up", path=upload.request.path, reason=reason)
        await self._give_up(upload)
        self._answer(upload.session, upload.request.request_id, UploadOutcome.RETRY, reason)

    async def _give_up(self, upload: _Upload) -> None:
        """Frees the slot and drops what arrived."""
        self._end(upload, committed=False)
        await self._discard(upload.request.request_id)

    def _end(self, upload: _Upload, *, committed: bool) -> None:
        request_id = upload.request.request_id
        if self._active.get(request_id) is upload:
            del self._active[request_id]
        self._carry_out(self._admission.finished(request_id, self._now(), committed=committed))

    async def _discard(self, request_id: str) -> None:
        discard = partial(self._services.nar_store.discard_partial, request_id)
        with trio.CancelScope(shield=True):
            try:
                await trio.to_thread.run_sync(discard, limiter=self._disk)
            except StorageError as error:
                log.error("a partial upload cannot be removed", request=request_id, reason=str(error))
            await self._rows.forget(request_id)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Gives up what stands still, and what nobody came back for."""
        known = await self._rows.known()
        clean = partial(self._services.nar_store.discard_partials_except, known)
        await trio.to_thread.run_sync(clean, limiter=self._disk)
        task_status.started()
        while True:
            await trio.sleep(_LOOK_EVERY_SECS)
            now = self._now()
            for request_id, upload in list(self._active.items()):
                idle_secs = now - upload.last_byte_at
                if upload.writer is None or upload.finishing or idle_secs < TRANSFER_STALL_SECS:
                    continue
                # While another was given up, it may have ended, or gone on in another session.
                if self._active.get(request_id) is upload:
                    await self._stalled(upload)
            self._carry_out(self._admission.expire(now))
            for request_id in await self._rows.expired():
                if request_id not in self._active:
                    await self._discard(request_id)

    # Small things

    def _granted(self, session: "Session", request_id: str) -> _Upload | None:
        upload = self._active.get(request_id)
        if upload is None or upload.session is not session or upload.writer is None or upload.finishing:
            return None
        return upload

    def _now(self) -> float:
        return self._services.clock.monotonic()

    @staticmethod
    def _answer(
        session: "Session", request_id: str, outcome: UploadOutcome, reason: str | None = None
    ) -> None:
        session.send(UploadCommitted(request_id=request_id, outcome=outcome, reason=reason))


def _append(writer: NarWriter, chunks: Sequence[UploadChunk]) -> int:
    offset = writer.offset
    for chunk in chunks:
        offset = writer.append(chunk.offset, chunk.data)
    return offset


def _compression(session: "Session") -> Compression:
    return Compression.ZSTD if session.capabilities.zstd else Compression.NONE
