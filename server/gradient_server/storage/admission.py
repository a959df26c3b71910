"""Which upload may send its bytes, and when. Pure: decisions go out as data.

- At most `concurrency` uploads run at once, and their estimated sizes stay within `bytes_budget`;
  one that is larger than the whole budget runs alone.
- Sessions are served in turn, each its own requests in order. Whoever's turn it is waits until it
  fits and is not passed over, so a large upload is not starved by small ones.
- Uploads of one path run one at a time: the others wait, are told Skip once the first is committed,
  and else go on. A path that is being waited for holds up nobody else. (A cluster member's upload is
  its own, `may_skip` False, and takes part in none of this.)
- A granted upload has a lease, renewed by every byte. When the session ends, its slot is free at
  once, and the partial object is kept until the lease runs out. When it runs out, in either state,
  the decision is Expired: the partial object goes.

Every request is in one state: waiting, granted, kept (its session is gone), or forgotten.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["AdmissionError", "Decision", "Expired", "Grant", "Skip", "UploadAdmission"]

# Requests of one session that may wait. A worker asks for a job's outputs, which are few.
MAX_WAITING_PER_SESSION = 10_000


class AdmissionError(Exception):
    """A session asked for what it may not: one line for the protocol error."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The upload may send its bytes; it holds a slot until it is released."""

    session: Hashable
    request_id: str


@dataclass(frozen=True, slots=True)
class Skip:
    """The path is held by now: nothing is to be sent. The request is forgotten."""

    session: Hashable
    request_id: str


@dataclass(frozen=True, slots=True)
class Expired:
    """The lease ran out: drop the partial object. `session` is None where it had ended before."""

    session: Hashable | None
    request_id: str


Decision = Grant | Skip | Expired


@dataclass(slots=True)
class _Request:
    session: Hashable | None
    request_id: str
    path: str
    size: int
    may_skip: bool
    # Monotonic time at which a granted or kept upload is given up.
    lease_until: float = 0.0


class UploadAdmission:
    """Decides over the uploads of all sessions. Times are monotonic seconds, sizes bytes."""

    def __init__(self, *, concurrency: int, bytes_budget: int, lease_idle_secs: float) -> None:
        if concurrency < 1 or bytes_budget < 1:
            raise ValueError("upload admission needs room for one upload at least")
        self._concurrency = concurrency
        self._bytes_budget = bytes_budget
        self._lease_idle_secs = lease_idle_secs
        # Whose turn it is comes first.
        self._waiting: OrderedDict[Hashable, deque[_Request]] = OrderedDict()
        self._waiting_ids: set[str] = set()
        self._granted: dict[str, _Request] = {}
        self._kept: dict[str, _Request] = {}
        self._bytes = 0
        # The granted request that holds each path.
        self._holder: dict[str, str] = {}

    @property
    def granted(self) -> int:
        """Slots in use."""
        return len(self._granted)

    @property
    def granted_bytes(self) -> int:
        """The estimates of the uploads that run."""
        return self._bytes

    @property
    def waiting(self) -> int:
        """Requests without a decision."""
        return len(self._waiting_ids)

    def request(
        self,
        session: Hashable,
        request_id: str,
        path: str,
        size_estimate: int,
        now: float,
        *,
        may_skip: bool = True,
    ) -> list[Decision]:
        """A session asks to upload a path; the same request again, from another session, moves to it.

        AdmissionError if the session has too many requests waiting.
        """
        if request_id in self._granted and self._granted[request_id].session == session:
            return [Grant(session, request_id)]
        if request_id in self._waiting_ids:
            if any(entry.request_id == request_id for entry in self._waiting.get(session, ())):
                return []
            self._withdraw(request_id)
        if len(self._waiting.get(session, ())) >= MAX_WAITING_PER_SESSION:
            raise AdmissionError(f"more than {MAX_WAITING_PER_SESSION} uploads wait for a grant")
        self._kept.pop(request_id, None)
        decisions = self._release(request_id, now) if request_id in self._granted else []
        queue = self._waiting.setdefault(session, deque())
        queue.append(_Request(session, request_id, path, max(0, size_estimate), may_skip))
        self._waiting_ids.add(request_id)
        return decisions + self._admit(now)

    def progress(self, request_id: str, now: float) -> None:
        """Bytes of a granted upload arrived: its lease starts anew."""
        if request_id in self._granted:
            self._granted[request_id].lease_until = now + self._lease_idle_secs

    def finished(self, request_id: str, now: float, *, committed: bool) -> list[Decision]:
        """An upload was answered: its slot is free. `committed`: whoever waits for the path may skip it."""
        request = self._granted.get(request_id)
        decisions: list[Decision] = []
        if committed and request is not None and request.may_skip:
            decisions = self._skip_all(request.path)
        self._withdraw(request_id)
        self._kept.pop(request_id, None)
        return decisions + self._release(request_id, now)

    def cancel(self, request_id: str, now: float) -> list[Decision]:
        """The worker gave it up, in whatever state it was."""
        return self.finished(request_id, now, committed=False)

    def session_ended(self, session: Hashable, now: float) -> list[Decision]:
        """What waits is forgotten (it is asked again), what runs is kept for its lease."""
        for request in self._waiting.pop(session, ()):
            self._waiting_ids.discard(request.request_id)
        ended = [request for request in self._granted.values() if request.session == session]
        for request in ended:
            self._free(request)
            request.session = None
            self._kept[request.request_id] = request
        return self._admit(now)

    def expire(self, now: float) -> list[Decision]:
        """Gives up what has been idle too long. Call it every few seconds."""
        decisions: list[Decision] = []
        for kept in [request for request in self._kept.values() if request.lease_until <= now]:
            del self._kept[kept.request_id]
            decisions.append(Expired(None, kept.request_id))
        for idle in [request for request in self._granted.values() if request.lease_until <= now]:
            self._free(idle)
            decisions.append(Expired(idle.session, idle.request_id))
        return decisions + self._admit(now)

    def next_expiry(self) -> float | None:
        """When the first lease runs out; None while there is none."""
        leases = [request.lease_until for request in (*self._granted.values(), *self._kept.values())]
        return min(leases, default=None)

    def _release(self, request_id: str, now: float) -> list[Decision]:
        request = self._granted.get(request_id)
        if request is not None:
            self._free(request)
        return self._admit(now)

    def _free(self, request: _Request) -> None:
        del self._granted[request.request_id]
        self._bytes -= request.size
        if self._holder.get(request.path) == request.request_id:
            del self._holder[request.path]

    def _withdraw(self, request_id: str) -> None:
        """Takes a waiting request out of its line."""
        if request_id not in self._waiting_ids:
            return
        self._waiting_ids.discard(request_id)
        for session, queue in list(self._waiting.items()):
            left = deque(request for request in queue if request.request_id != request_id)
            if len(left) != len(queue):
                self._replace_queue(session, left)
                return

    def _skip_all(self, path: str) -> list[Decision]:
        decisions: list[Decision] = []
        for session, queue in list(self._waiting.items()):
            skipped = [request for request in queue if request.path == path and request.may_skip]
            if skipped:
                decisions += [Skip(session, request.request_id) for request in skipped]
                self._waiting_ids.difference_update(request.request_id for request in skipped)
                self._replace_queue(session, deque(request for request in queue if request not in skipped))
        return decisions

    def _replace_queue(self, session: Hashable, queue: deque[_Request]) -> None:
        if queue:
            self._waiting[session] = queue
        else:
            del self._waiting[session]

    def _admit(self, now: float) -> list[Decision]:
        """Grants, in turn, as long as the next one fits."""
        decisions: list[Decision] = []
        while (found := self._next()) is not None:
            session, request = found
            if not self._fits(request):
                break
            queue = self._waiting[session]
            queue.remove(request)
            self._waiting_ids.discard(request.request_id)
            if queue:
                self._waiting.move_to_end(session)
            else:
                del self._waiting[session]
            request.lease_until = now + self._lease_idle_secs
            self._granted[request.request_id] = request
            self._bytes += request.size
            if request.may_skip:
                self._holder[request.path] = request.request_id
            decisions.append(Grant(session, request.request_id))
        return decisions

    def _next(self) -> tuple[Hashable, _Request] | None:
        """The request whose turn it is, those that wait for somebody else's upload of their path apart."""
        for session, queue in self._waiting.items():
            for request in queue:
                if not request.may_skip or request.path not in self._holder:
                    return session, request
        return None

    def _fits(self, request: _Request) -> bool:
        if not self._granted:
            return True
        return len(self._granted) < self._concurrency and self._bytes + request.size <= self._bytes_budget
