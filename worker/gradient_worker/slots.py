"""Which assignments take a slot, and of which kind (protocol.md, "Offers and requests").

A slot is taken by an assignment from its acceptance, a held one included, until its final report is
sent. `RequestJob` is a level: it says that a slot is free, so nothing here counts requests.
"""

from collections.abc import Mapping

from gradient_protocol.kinds import JobKind

__all__ = ["Slots"]


class Slots:
    """Slots per kind. `maximum` as announced in WorkerCapabilities."""

    def __init__(self, maximum: Mapping[JobKind, int]) -> None:
        self._maximum = dict(maximum)
        self._taken: dict[str, JobKind] = {}
        self._closed = False

    @property
    def closed(self) -> bool:
        """A draining worker has no free slot any more."""
        return self._closed

    def close(self) -> None:
        """No more jobs: every slot counts as taken from here on."""
        self._closed = True

    def taken(self, kind: JobKind) -> int:
        """How many assignments of this kind hold a slot."""
        return sum(1 for other in self._taken.values() if other is kind)

    def free(self, kind: JobKind) -> int:
        """Slots of this kind that another assignment could take; never negative."""
        if self._closed:
            return 0
        return max(0, self._maximum.get(kind, 0) - self.taken(kind))

    def take(self, kind: JobKind, assignment_id: str) -> bool:
        """Take a slot; False where none is free. Taking it again changes nothing."""
        if assignment_id in self._taken:
            return True
        if not self.free(kind):
            return False
        self._taken[assignment_id] = kind
        return True

    def adopt(self, kind: JobKind, assignment_id: str) -> None:
        """Take a slot for a job that an earlier agent accepted, even beyond a lowered maximum."""
        self._taken[assignment_id] = kind

    def give_back(self, assignment_id: str) -> JobKind | None:
        """Free the assignment's slot. Returns its kind, None where it had none."""
        return self._taken.pop(assignment_id, None)
