"""The lines of JSON that come through a member's socket, as typed data (docs/cluster-programs.md). Pure."""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec
from gradient_protocol.limits import MAX_INT
from gradient_protocol.messages.shapes import RosterEntry, SignalTarget

__all__ = [
    "MAX_ROSTER_VARIABLE_BYTES",
    "BadRequest",
    "Enter",
    "Receive",
    "Request",
    "Roster",
    "Send",
    "Take",
    "Target",
    "Wait",
    "entry_fields",
    "payload_of",
    "read_request",
    "roster_text",
    "target_of",
]

MAX_ROSTER_VARIABLE_BYTES: Final = 100_000
"""The kernel starts no program with a variable of 128 KiB or more."""

Whole = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
Secs = Annotated[float, msgspec.Meta(ge=0)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class BadRequest(Exception):  # noqa: N818 - a program's mistake, told to the program
    """A line that is no request; the text says why."""


class _Request(msgspec.Struct, frozen=True, tag_field="op", forbid_unknown_fields=True):
    """Unknown fields are refused: a misspelt timeout must not wait for ever."""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member, or without `index` all of a role."""

    role: str
    index: Whole | None = None


class Roster(_Request, frozen=True, tag="roster"):
    """Who takes part."""


class Send(_Request, frozen=True, tag="send"):
    """A signal. At most one of `payload` (text) and `payload_base64`."""

    id: Id
    topic: str
    to: Target | None = None
    payload: str | None = None
    payload_base64: str | None = None


class Receive(_Request, frozen=True, tag="recv"):
    """The next signal that was not taken; without `timeout_secs` it waits as long as it takes."""

    topic: str | None = None
    sender: Target | None = msgspec.field(default=None, name="from")
    timeout_secs: Secs | None = None


class Take(_Request, frozen=True, tag="take"):
    """The signal `n` has arrived at the program; `id` names this take when it is asked again."""

    id: Id
    n: Whole


class Enter(_Request, frozen=True, tag="enter"):
    """Enter a barrier."""

    barrier: str


class Wait(_Request, frozen=True, tag="wait"):
    """Wait until all others have entered it `k` times."""

    barrier: str
    k: Whole
    timeout_secs: Secs | None = None


Request = Roster | Send | Receive | Take | Enter | Wait

_DECODER: Final = msgspec.json.Decoder(Request)


def read_request(line: bytes) -> Request:
    """One line. Raises BadRequest."""
    try:
        request: Request = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(str(error)) from None
    except RecursionError:
        raise BadRequest("the line is nested too deeply") from None
    return request


def payload_of(request: Send) -> bytes:
    """The payload as bytes; none is empty. Raises BadRequest."""
    if request.payload is not None and request.payload_base64 is not None:
        raise BadRequest("payload and payload_base64 exclude each other")
    if request.payload_base64 is None:
        return (request.payload or "").encode()
    try:
        return base64.b64decode(request.payload_base64, validate=True)
    except binascii.Error as error:
        raise BadRequest(f"payload_base64: {error}") from None


def target_of(target: Target | None) -> SignalTarget | None:
    """As the wire has it."""
    return None if target is None else SignalTarget(role=target.role, index=target.index)


def entry_fields(entry: RosterEntry) -> Mapping[str, object]:
    """A roster entry for programs: every field is there, an endpoint that is not known is null."""
    return {
        "role": entry.role,
        "index": entry.index,
        "worker": entry.worker,
        "endpoint": entry.endpoint,
        "primary": entry.primary,
    }


def roster_text(roster: Sequence[RosterEntry]) -> str | None:
    """GRADIENT_CLUSTER_ROSTER; None for one too long for a variable, which is on the socket all the same."""
    text = json.dumps([entry_fields(entry) for entry in roster], separators=(",", ":"))
    return text if len(text) <= MAX_ROSTER_VARIABLE_BYTES else None
