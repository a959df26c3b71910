"""What the graph is told from outside: the configured limits, and what is known of the pool's memory."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["GraphSettings"]


def _nothing_known() -> int | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSettings:
    """Options of operations.md under their names, in snake case, with their defaults.

    `largest_worker_ram_mb` gives the largest total memory (MiB) of a worker that builds, None while
    none is known; it is called in the database's thread and must not wait.
    """

    max_attempts: int = 3
    retry_backoff_secs: float = 30.0
    inputs_unavailable_max_loops: int = 3
    substitute_miss_escalation_threshold: int = 2
    largest_worker_ram_mb: Callable[[], int | None] = _nothing_known
