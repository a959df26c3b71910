"""Messages to bytes and back: one MessagePack map, without its length (protocol.md, "Stream").

Decoding reads the `type` first and hands the rest to msgspec's decoder of that one class, which
refuses by type without building anything else (design.md, "Measured floors"). msgspec skips what a
class does not name, so the rest has to be looked at as well: a message that we would have written
byte for byte ourselves holds nothing unseen; any other is walked by `scan`.
"""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from gradient_protocol.contents import CHECKS, refine
from gradient_protocol.errors import BAD_REQUEST, ProtocolError
from gradient_protocol.limits import MAX_ELEMENTS
from gradient_protocol.messages.common import Message, Zstd
from gradient_protocol.messages.server import SERVER_MESSAGES, JobListChunk, JobOffer, NarPush
from gradient_protocol.messages.worker import (
    WORKER_MESSAGES,
    CandidateScores,
    LogChunk,
    UploadChunk,
    WorkerMetrics,
)
from gradient_protocol.scan import check_limits
from gradient_protocol.text import holds_nul, made_legible

__all__ = ["Decoder", "Side", "encode"]

_encode = msgspec.msgpack.Encoder().encode
_TYPE_KEY = b"\xa4type"
# Classes of text, integers, booleans and one `data`: no arrays, and a size that tells everything.
_DATA_CLASSES: Final = frozenset({LogChunk, NarPush, UploadChunk, Zstd})
# Many, and full of zeros; their ids are only looked up among those that the reader has in memory.
_IDS_ALONE: Final = frozenset({CandidateScores, JobListChunk, JobOffer, WorkerMetrics})


class Side(enum.Enum):
    """The two ends of a session."""

    WORKER = "worker"
    SERVER = "server"

    @property
    def other(self) -> "Side":
        """Who is at the far end."""
        return Side.SERVER if self is Side.WORKER else Side.WORKER


def encode(message: Message) -> bytes:
    """One map, `type` first, optional fields that are None left out. Any size: the caller judges it."""
    try:
        return _encode(message)
    except UnicodeEncodeError:  # half a surrogate pair, as in a file's name that is not UTF-8
        return _encode(made_legible(message))


class _TypeOnly(msgspec.Struct, frozen=True):
    """Reads the `type` wherever it stands in the map."""

    type: str


@dataclass(frozen=True, slots=True)
class _Entry:
    """How one class is read."""

    cls: type[Message]
    decode: Callable[[bytes], Message]
    has_arrays: bool
    has_text: bool
    check: Callable[[Message, int], None] | None


def _entries(classes: Iterable[type[Message]]) -> dict[bytes, _Entry]:
    return {
        str(cls.__struct_config__.tag).encode(): _Entry(
            cls=cls,
            decode=msgspec.msgpack.Decoder(cls).decode,
            has_arrays=cls not in _DATA_CLASSES,
            has_text=cls not in _DATA_CLASSES | _IDS_ALONE,
            check=CHECKS.get(cls),
        )
        for cls in classes
    }


_BY_SENDER = {Side.WORKER: _entries(WORKER_MESSAGES), Side.SERVER: _entries(SERVER_MESSAGES)}
_decode_type = msgspec.msgpack.Decoder(_TypeOnly).decode


class Decoder:
    """Reads what one side sends. Keeps no state, so one serves any number of sessions."""

    __slots__ = ("_entries",)

    def __init__(self, sender: Side) -> None:
        self._entries = _BY_SENDER[sender]

    def decode(self, payload: bytes) -> Message:
        """The message in `payload`.

        Raises ProtocolError 400 or 413, ReportContentError for the content of a numbered report
        whose ids could be read, JobContentError for the job of an `AssignJob`.
        """
        entry = None
        if payload[1:6] == _TYPE_KEY and len(payload) > 6:
            entry = self._entries.get(payload[7 : payload[6] - 0x99])  # 7 + length of the fixstr
        if entry is None:
            entry = self._find(payload)
        # Over 100,000 elements take as many bytes, and an array32 or a map32. (One that only declares
        # them is refused below: msgspec reserves nothing that the bytes present do not justify.)
        if len(payload) > MAX_ELEMENTS and entry.has_arrays and (b"\xdd" in payload or b"\xdf" in payload):
            _walk(entry.cls, payload)
        try:
            message = entry.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            _walk(entry.cls, payload)
            raise refine(entry.cls, payload, _one_line(error), in_job=True) from None
        if not (_encode(message) == payload if entry.has_arrays else _is_bare(message, payload)):
            _walk(entry.cls, payload)
        # Numbers have zero bytes too, so this is a first look alone.
        if entry.has_text and b"\0" in payload and holds_nul(message):
            raise refine(entry.cls, payload, "text holds a NUL character", in_job=True)
        if entry.check is not None:
            entry.check(message, len(payload))
        return message

    def _find(self, payload: bytes) -> _Entry:
        """The slow way to the class: `type` not first, or unknown."""
        try:
            name = _decode_type(payload).type
        except (msgspec.MsgspecError, RecursionError) as error:
            check_limits(payload)
            raise ProtocolError(BAD_REQUEST, f"not a message: {_one_line(error)}") from None
        entry = self._entries.get(name.encode())
        if entry is None:
            check_limits(payload)
            raise ProtocolError(BAD_REQUEST, f"unknown message type {name[:64]!r}")
        return entry


def _walk(cls: type[Message], payload: bytes) -> None:
    """Judges the whole of `payload`; bad content of a report or job is told apart."""
    try:
        check_limits(payload)
    except ProtocolError as error:
        if error.code != BAD_REQUEST:
            raise
        raise refine(cls, payload, error.reason, in_job=False) from None


def _is_bare(message: Message, payload: bytes) -> bool:
    """Whether `payload` holds nothing but the fields of one of the `_DATA_CLASSES`.

    Without floats and optional fields none can be shorter than we write it, so sizes decide, and
    the data need not be copied once more.
    """
    size = len(message.data)  # type: ignore[attr-defined]  # the classes that have it come here
    header = 2 if size < 0x100 else 3 if size < 0x10000 else 5
    bare = len(_encode(msgspec.structs.replace(message, data=b""))) - 2
    return bare + header + size == len(payload)


def _one_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return " ".join(str(error).split())[:300]
