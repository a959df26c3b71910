"""Who is connected. One session a worker; a newer one takes the older one's place."""

import enum
from collections.abc import Iterator

import trio
from gradient_protocol.limits import SILENT_SESSION_SECS

from gradient_server.net.session import Session

__all__ = ["Sessions", "Takeover"]


class Takeover(enum.Enum):
    """What a worker that proved who it is finds (protocol.md, Handshake)."""

    FREE = "no other session"
    REPLACES = "an older session of the same incarnation, or one gone silent"
    REFUSED = "connected already: 496"


class Sessions:
    """The sessions of authenticated workers, by worker id, in the order of their arrival."""

    def __init__(self) -> None:
        self._by_worker: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_worker)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._by_worker.values()))

    def get(self, worker_id: str) -> Session | None:
        """The worker's session, also one that has not resumed yet."""
        return self._by_worker.get(worker_id)

    def resumed(self, worker_id: str) -> Session | None:
        """The worker's session once its assignments are settled: what concerns these may be sent."""
        session = self._by_worker.get(worker_id)
        return session if session is not None and session.resumed else None

    def largest_build_ram_mb(self) -> int | None:
        """The largest memory (MiB) of a connected worker that builds. May be called from any thread."""
        return max(
            (
                session.worker_capabilities.ram_total_mb
                for session in self
                if session.capabilities.build and session.worker_capabilities is not None
            ),
            default=None,
        )

    def takeover(self, worker_id: str, incarnation: str, now: float) -> Takeover:
        """May this incarnation of the worker have a session? `now` on the monotonic clock."""
        older = self._by_worker.get(worker_id)
        if older is None:
            return Takeover.FREE
        if older.incarnation == incarnation or older.silent_secs(now) >= SILENT_SESSION_SECS:
            return Takeover.REPLACES
        return Takeover.REFUSED

    async def enter(self, session: Session) -> None:
        """Makes it the worker's session; returns once an older one has let go of everything.

        The older session is cut off at once: what it had received and not worked on is discarded.
        """
        older = self._by_worker.get(session.worker_id)
        self._by_worker[session.worker_id] = session
        if older is None:
            return
        older.replaced = True
        older.scope.cancel()
        # Shielded, for whoever replaces this session in turn must also find the oldest one gone.
        # It ends within the time of one database or disk operation.
        with trio.CancelScope(shield=True):
            await older.done.wait()

    def leave(self, session: Session) -> None:
        """The session is over. Another one that took its place stays."""
        if self._by_worker.get(session.worker_id) is session:
            del self._by_worker[session.worker_id]
        session.done.set()
