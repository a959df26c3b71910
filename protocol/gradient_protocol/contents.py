"""Rules on fields that a type alone does not state, and whose fault a bad field is.

A bad field ends the session, save inside the job of an `AssignJob` or inside a numbered report
(protocol.md, "Stream" and "Reports that must not be lost").
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from gradient_protocol.errors import (
    BAD_REQUEST,
    TOO_LARGE,
    JobContentError,
    ProtocolError,
    ReportContentError,
)
from gradient_protocol.limits import (
    MAX_CHUNK_DATA,
    MAX_ERROR_TEXT,
    MAX_ID_CHARS,
    MAX_INT,
    MAX_OFFER_BYTES,
    MAX_WINDOW_CANDIDATES,
)
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.server import AssignJob, JobListChunk, JobOffer, NarPush
from gradient_protocol.messages.shapes import BuildOutput, ClusterSeat, EvalResult, EvalStats, FetchResult
from gradient_protocol.messages.worker import (
    ClusterSignalReport,
    ImportRequest,
    JobCompleted,
    JobFailed,
    JobUpdate,
    LogChunk,
    UploadChunk,
    UploadRequest,
)
from gradient_protocol.scan import check_limits

__all__ = ["CHECKS", "NUMBERED_UPDATES", "is_numbered_report", "refine"]

NUMBERED_UPDATES: Final = (FetchResult, EvalResult, EvalStats, BuildOutput)
_REPORTS: Final = frozenset({JobUpdate, JobCompleted, JobFailed, ClusterSignalReport})


def is_numbered_report(message: Message) -> bool:
    """Whether the server stores and acknowledges this message by its `seq`."""
    if isinstance(message, JobUpdate):
        return isinstance(message.update, NUMBERED_UPDATES)
    return type(message) in _REPORTS


class _ReportIds(msgspec.Struct, frozen=True):
    """What has to be legible of a report for its session to live."""

    assignment_id: str
    seq: int


class _AssignJobShell(msgspec.Struct, frozen=True):
    """An `AssignJob` around its job."""

    job_id: str
    assignment_id: str
    job: msgspec.Raw
    cluster: ClusterSeat | None = None


_decode_report_ids = msgspec.msgpack.Decoder(_ReportIds).decode
_decode_shell = msgspec.msgpack.Decoder(_AssignJobShell).decode


def refine(cls: type[Message], payload: bytes, reason: str, *, in_job: bool) -> ProtocolError:
    """The error for a message of `cls` that is refused with 400 for `reason`.

    `in_job` says that everything around an `AssignJob`'s job has the right types once it can be
    read at all; else the fault is searched in the job's own bytes.
    """
    plain = ProtocolError(BAD_REQUEST, f"{cls.__struct_config__.tag}: {reason}")
    try:
        if cls in _REPORTS:
            ids = _decode_report_ids(payload)
            if 1 <= ids.seq <= MAX_INT:
                return ReportContentError(plain.reason, assignment_id=ids.assignment_id, seq=ids.seq)
        elif cls is AssignJob:
            shell = _decode_shell(payload)
            if in_job or not _is_sound(bytes(shell.job)):
                return JobContentError(plain.reason, assignment_id=shell.assignment_id)
    except (msgspec.MsgspecError, RecursionError):
        return plain
    return plain


def _is_sound(value: bytes) -> bool:
    try:
        check_limits(value)
    except ProtocolError:
        return False
    return True


def _check_seq(message: JobUpdate | JobCompleted | JobFailed | ClusterSignalReport) -> None:
    if message.seq is None or message.seq < 1:
        raise ProtocolError(BAD_REQUEST, f"{type(message).__name__}: a numbered report counts from 1")


def _check_update(message: JobUpdate, _size: int) -> None:
    if is_numbered_report(message):
        _check_seq(message)
    elif message.seq is not None:
        kind = type(message.update).__struct_config__.tag
        raise ProtocolError(BAD_REQUEST, f"JobUpdate: {kind} is not a numbered report and has no seq")


def _check_report(message: JobCompleted | ClusterSignalReport, _size: int) -> None:
    _check_seq(message)


def _check_failed(message: JobFailed, _size: int) -> None:
    _check_seq(message)
    # Characters first: they are counted already, and are never more than the bytes.
    if len(message.error) > MAX_ERROR_TEXT or len(message.error.encode()) > MAX_ERROR_TEXT:
        raise ReportContentError(
            f"JobFailed: error of more than {MAX_ERROR_TEXT} bytes",
            assignment_id=message.assignment_id,
            seq=message.seq,
        )


def _check_data(message: LogChunk | UploadChunk | NarPush, _size: int) -> None:
    if len(message.data) > MAX_CHUNK_DATA:
        raise ProtocolError(TOO_LARGE, f"a chunk of more than {MAX_CHUNK_DATA} bytes of data")


def _check_offer(message: JobOffer | JobListChunk, size: int) -> None:
    if size > MAX_OFFER_BYTES:
        raise ProtocolError(TOO_LARGE, f"an offer of more than {MAX_OFFER_BYTES} bytes")
    if len(message.candidates) > MAX_WINDOW_CANDIDATES:
        raise ProtocolError(TOO_LARGE, f"an offer of more than {MAX_WINDOW_CANDIDATES} candidates")


def _check_import(message: ImportRequest, _size: int) -> None:
    _check_id("ImportRequest", message.query_id)


def _check_upload(message: UploadRequest, _size: int) -> None:
    _check_id("UploadRequest", message.request_id)


def _check_id(name: str, value: str) -> None:
    if len(value) > MAX_ID_CHARS:
        raise ProtocolError(BAD_REQUEST, f"{name}: an id of more than {MAX_ID_CHARS} characters")


# (message, size of its encoding) -> None, or raises. Any: each check takes its own class.
CHECKS: Final[dict[type[Message], Callable[[Any, int], None]]] = {
    JobUpdate: _check_update,
    JobCompleted: _check_report,
    JobFailed: _check_failed,
    ClusterSignalReport: _check_report,
    ImportRequest: _check_import,
    UploadRequest: _check_upload,
    LogChunk: _check_data,
    UploadChunk: _check_data,
    NarPush: _check_data,
    JobOffer: _check_offer,
    JobListChunk: _check_offer,
}
