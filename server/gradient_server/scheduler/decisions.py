"""The last 200 decisions, rejected candidates included, for the job board."""

from collections import deque
from dataclasses import dataclass

from gradient_protocol.kinds import JobKind

from gradient_server.scheduler.model import DECISION_RING

__all__ = ["Considered", "Decision", "DecisionRing"]


@dataclass(frozen=True, slots=True)
class Considered:
    """One candidate of a decision: its points by rule, and the rules that held it."""

    job_id: str
    name: str
    total: float
    rules: dict[str, float]
    vetoes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """One answer to a worker that asked. `at` is wall time; `best` are the highest totals.

    `eligible` candidates were looked at, `unscored` of them held without a score because the
    worker has not reported on them, `vetoed` and `below_floor` of the rest did not pass.
    """

    at: float
    worker_id: str
    worker_name: str
    kind: JobKind
    chosen: str | None
    eligible: int
    unscored: int
    vetoed: int
    below_floor: int
    best: tuple[Considered, ...]


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
