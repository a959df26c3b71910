"""One worker's window on the queue of one kind, and what the worker reported of it.

Entries are dense, with the scores beside them as columns, so that a decision takes them over
without a look at each.
"""

import numpy as np
import numpy.typing as npt
from gradient_protocol.messages.worker import CandidateScore

from gradient_server.scheduler.tracker import Tracked
from gradient_server.scoring.columns import Flags, Vector

__all__ = ["Window"]

_FIRST_CAPACITY = 16


class Window:
    """The candidates that a worker was offered, in no order."""

    def __init__(self) -> None:
        self._entries: list[Tracked] = []
        self._places: dict[str, int] = {}
        self._scored: list[bool] = []
        self._missing_count: Vector = np.full(_FIRST_CAPACITY, np.nan)
        self._missing_nar_size: Vector = np.full(_FIRST_CAPACITY, np.nan)
        self._outputs_present: Flags = np.zeros(_FIRST_CAPACITY, np.bool_)
        self.unscored = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._places

    @property
    def entries(self) -> list[Tracked]:
        """The candidates, in the order of the score columns; not to be changed."""
        return self._entries

    @property
    def missing_count(self) -> Vector:
        """As reported, NaN for what was not yet; of the capacity's length, at least 1."""
        return self._missing_count

    @property
    def missing_nar_size(self) -> Vector:
        """Bytes, as `missing_count`."""
        return self._missing_nar_size

    @property
    def outputs_present(self) -> Flags:
        """As `missing_count`; False for what was not reported."""
        return self._outputs_present

    def place(self, job_id: str) -> int:
        """Where a candidate is in `entries` and the score columns; -1 for nowhere."""
        return self._places.get(job_id, -1)

    def rows(self) -> npt.NDArray[np.intp]:
        """The rows of the entries in their table."""
        return np.fromiter((entry.row for entry in self._entries), np.intp, len(self._entries))

    def add(self, tracked: Tracked) -> None:
        """A candidate joins, unscored."""
        place = len(self._entries)
        if place == len(self._missing_count):
            self._grow()
        self._entries.append(tracked)
        self._scored.append(False)
        self._places[tracked.job.job_id] = place
        self._clear(place)
        self.unscored += 1

    def remove(self, job_id: str) -> bool:
        """A candidate leaves. False if it was not there."""
        place = self._places.pop(job_id, None)
        if place is None:
            return False
        self.unscored -= not self._scored[place]
        last = len(self._entries) - 1
        moved = self._entries.pop()
        was_scored = self._scored.pop()
        if place != last:
            self._scored[place] = was_scored
            self._entries[place] = moved
            self._places[moved.job.job_id] = place
            self._missing_count[place] = self._missing_count[last]
            self._missing_nar_size[place] = self._missing_nar_size[last]
            self._outputs_present[place] = self._outputs_present[last]
        return True

    def score(self, reported: CandidateScore) -> bool:
        """The worker scored a candidate. False if it is not in the window (any more)."""
        place = self._places.get(reported.job_id)
        if place is None:
            return False
        self.unscored -= not self._scored[place]
        self._scored[place] = True
        self._missing_count[place] = max(reported.missing_count, 0)
        self._missing_nar_size[place] = max(reported.missing_nar_size, 0)
        self._outputs_present[place] = reported.outputs_present
        return True

    def _clear(self, place: int) -> None:
        self._missing_count[place] = np.nan
        self._missing_nar_size[place] = np.nan
        self._outputs_present[place] = False

    def _grow(self) -> None:
        size = len(self._missing_count)
        self._missing_count = np.concatenate([self._missing_count, np.full(size, np.nan)])
        self._missing_nar_size = np.concatenate([self._missing_nar_size, np.full(size, np.nan)])
        self._outputs_present = np.concatenate([self._outputs_present, np.zeros(size, np.bool_)])
