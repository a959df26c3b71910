"""The sweeps by name, and what they have done: passes that find what no event will come for."""

import enum
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Sweep", "SweepFigures"]


class Sweep(enum.StrEnum):
    """Their names, as logs and metrics show them (docs/deadlines.md has the table)."""

    ABANDONED_DISPATCH = "abandoned-dispatch-sweep"
    EVALUATION_WATCHDOG = "evaluation-watchdog"
    UNCONFIRMED_ABORTS = "unconfirmed-abort-reaper"
    DRAIN_DEADLINES = "drain-deadline-sweep"
    CLUSTERS = "cluster-retention"
    EVALUATIONS = "evaluation-collection"
    DERIVATIONS = "derivation-collection"
    NARS = "nar-collection"
    OBJECTS = "orphan-object-collection"
    LOGS = "orphan-log-collection"


@dataclass(slots=True)
class SweepFigures:
    """Since the start: passes that ended, what they closed, repaired or deleted, and passes that failed."""

    passes: Counter[Sweep] = field(default_factory=Counter)
    found: Counter[Sweep] = field(default_factory=Counter)
    failures: Counter[Sweep] = field(default_factory=Counter)

    def ended(self, sweep: Sweep, found: int) -> None:
        """A pass is over."""
        self.passes[sweep] += 1
        self.found[sweep] += found
