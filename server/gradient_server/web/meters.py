"""What is measured here all the time: the event loop's lateness, and how long claims take."""

from typing import Final

import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gradient_server.domain.events import Event, PathStored
from gradient_server.net.services import Services

__all__ = ["Meters"]

BEAT_SECS: Final = 0.5
# A beat that is so late means a loop that does not turn (/readyz).
STALE_SECS: Final = 10.0
_CLAIM_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
_LATENESS_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Meters:
    """`run` is a loop; `on_event` is for the bus."""

    def __init__(self, services: Services, registry: CollectorRegistry) -> None:
        self._services = services
        self._seen: set[str] = set()
        self._beat_at: float | None = None
        self._lateness = Histogram(
            "gradient_event_loop_lateness_seconds",
            "How much later than asked for the event loop came back, twice a second.",
            buckets=_LATENESS_BUCKETS,
            registry=registry,
        )
        self._latest = Gauge(
            "gradient_event_loop_lateness_latest_seconds", "The last of them.", registry=registry
        )
        self._claims = Histogram(
            "gradient_claim_seconds",
            "From a decision to its AssignJob, the commit within; of assignments seen twice a second.",
            buckets=_CLAIM_BUCKETS,
            registry=registry,
        )
        self._stored = Counter(
            "gradient_nar_stored_bytes", "Uncompressed bytes of paths that were stored.", registry=registry
        )

    @property
    def silent_secs(self) -> float | None:
        """Since the last beat; None before the first."""
        return None if self._beat_at is None else trio.current_time() - self._beat_at

    @property
    def is_alive(self) -> bool:
        """Whether the loop beats."""
        silent = self.silent_secs
        return silent is not None and silent < STALE_SECS

    def on_event(self, event: Event) -> None:
        """Counts what was stored."""
        if isinstance(event, PathStored):
            self._stored.inc(event.nar_size)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Beats for ever."""
        self._beat_at = trio.current_time()
        task_status.started()
        while True:
            due = trio.current_time() + BEAT_SECS
            await trio.sleep_until(due)
            self._beat_at = trio.current_time()
            self._lateness.observe(self._beat_at - due)
            self._latest.set(self._beat_at - due)
            self._look_at_claims()

    def _look_at_claims(self) -> None:
        open_now = self._services.scheduler.pool.assignments
        self._seen &= open_now.keys()
        for assignment_id, assignment in open_now.items():
            if assignment_id in self._seen:
                continue
            if assignment.sent_at is not None:
                self._claims.observe(assignment.sent_at - assignment.assigned_at)
                self._seen.add(assignment_id)
