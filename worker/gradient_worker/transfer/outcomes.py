"""How transfers end, as values."""

import enum
from dataclasses import dataclass

from gradient_worker.stores.base import PathInfo

__all__ = ["Again", "Downloaded", "Lost", "Refused", "Stalled", "Uploaded"]


@dataclass(frozen=True, slots=True)
class Downloaded:
    """The path is in the store. Sizes in bytes; `stored_bytes` as it travelled."""

    info: PathInfo
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The server does not have the path (`damaged`: has it, but not what it says it is)."""

    path: str
    reason: str
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Stalled:
    """The transfer came to nothing, however often it was tried, through no fault of the path."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The server holds the path. `pushed`: bytes travelled for it; `granted_at` as `SpanLog.now`."""

    info: PathInfo
    pushed: bool
    granted_at: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The server does not take the path, or this worker cannot send it as asked."""

    path: str
    reason: str


class Again(enum.Enum):
    """An upload that has to start anew, under a new request id."""

    STALLED = "no byte moved for a minute"
    RETRY = "the server asked to start again"
