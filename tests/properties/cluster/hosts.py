"""Simulated workers as far as clusters know them."""

from dataclasses import dataclass, field

from gradient_server.cluster.verdict import MemberState

__all__ = ["Held", "Host"]


@dataclass
class Held:
    """A member at its worker. `report`: its final state, to be sent until it was stored."""

    assignment_id: str
    job_id: str
    attempt: str
    until: float
    running: bool = False
    report: MemberState | None = None


@dataclass
class Host:
    """One simulated worker with one build slot."""

    name: str
    connected: bool = False
    has: dict[str, Held] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    away_since: float = 0.0
    # The server gave up what it had, at its last absence.
    given_up: bool = False

    @property
    def busy(self) -> bool:
        return any(one.report is None for one in self.has.values())

    @property
    def runs(self) -> bool:
        return any(one.running and one.report is None for one in self.has.values())
