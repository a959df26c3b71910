"""The last 200 decisions, rejected candidates included, for the job board."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gradient_protocol.kinds import JobKind

from gradient_server.scheduler.model import DECISION_RING
from gradient_server.scheduler.selection import in_order
from gradient_server.scoring.policy import Scores

__all__ = ["Considered", "Decision", "DecisionDetail", "DecisionRing"]

_SHOWN = 10
_KEPT_WHOLE = 128


@dataclass(frozen=True, slots=True)
class Considered:
    """One candidate of a decision: its points by rule, and the rules that held it."""

    job_id: str
    total: float
    rules: dict[str, float]
    vetoes: tuple[str, ...]


class DecisionDetail:
    """The scores behind a decision, written out only when somebody looks.

    Those of up to `_KEPT_WHOLE` candidates are kept as they are; of more, the best are written out at
    once, so that the ring stays small.
    """

    __slots__ = ("_best", "_job_ids", "_scores")

    def __init__(self, scores: Scores, job_ids: Sequence[str]) -> None:
        self._scores: Scores | None = scores
        self._job_ids = job_ids
        self._best: tuple[Considered, ...] = ()
        if len(job_ids) > _KEPT_WHOLE:
            self.best()

    def best(self) -> tuple[Considered, ...]:
        """The candidates with the highest totals, at most `_SHOWN`, rejected ones included."""
        scores = self._scores
        if scores is not None:
            places = in_order(scores.total, self._job_ids, np.arange(len(self._job_ids)), _SHOWN)
            self._best = tuple(
                Considered(
                    job_id=self._job_ids[place],
                    total=float(scores.total[place]),
                    rules=scores.points_of(place),
                    vetoes=scores.vetoes_of(place),
                )
                for place in places
            )
            self._scores, self._job_ids = None, ()
        return self._best


@dataclass(frozen=True, slots=True)
class Decision:
    """One answer to a worker that asked. `at` is wall time.

    `pending` jobs of the kind waited; `considered` of them could be given to this worker. Of these,
    `vetoed` were held, and `below_floor` did not pass otherwise; what the policy holds for want of a
    score is not considered.
    """

    at: float
    worker_id: str
    worker_name: str
    kind: JobKind
    chosen: str | None
    pending: int
    considered: int
    vetoed: int
    below_floor: int
    detail: DecisionDetail

    @property
    def best(self) -> tuple[Considered, ...]:
        """The highest totals, rejected candidates included."""
        return self.detail.best()


class DecisionRing:
    """Keeps the newest `DECISION_RING` decisions."""

    def __init__(self) -> None:
        self._ring: deque[Decision] = deque(maxlen=DECISION_RING)
        self.made = 0

    def __len__(self) -> int:
        return len(self._ring)

    def record(self, decision: Decision) -> None:
        """The newest decision."""
        self._ring.append(decision)
        self.made += 1

    def newest_first(self) -> list[Decision]:
        """What is kept."""
        return list(reversed(self._ring))
