"""Lengths of time of cluster jobs: the configured ones and those that the specification fixes."""

from dataclasses import dataclass
from typing import Final

__all__ = [
    "HOLD_EXTRA_SECS",
    "PASS_SECS",
    "REFRESH_SECS",
    "SURVIVORS_SECS",
    "UNCONFIRMED_ABORT_SECS",
    "ClusterSettings",
]

PASS_SECS: Final = 5.0  # the planner's backstop
REFRESH_SECS: Final = 5.0  # what other instances have done
HOLD_EXTRA_SECS: Final = 10.0  # a worker holds for longer than the server prepares
SURVIVORS_SECS: Final = 300.0  # after AbortCluster
UNCONFIRMED_ABORT_SECS: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Options of operations.md under their names, in snake case, with their defaults."""

    prepare_timeout_secs: float = 30.0
    reserve_after_secs: float = 600.0
    reserve_timeout_secs: float = 1800.0
    backfill: bool = False

    @property
    def hold_secs(self) -> float:
        """How long a worker that never hears StartCluster keeps the slot."""
        return self.prepare_timeout_secs + HOLD_EXTRA_SECS
