"""What the runner tells the service manager, from the loop itself: one that is blocked falls silent."""

from __future__ import annotations

from gradient_protocol.notify import Notifier

from gradient_worker.runner.saying import say

__all__ = ["Manager"]

_NEVER = float("inf")
_STATUS_SECS = 1.0


class Manager:
    """READY at the first tick, the status when it is another one, and the watchdog's pings."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._ping_secs = _NEVER if notifier.watchdog_secs is None else notifier.watchdog_secs / 2
        self._ping_at = 0.0
        self._status_at = 0.0
        self._status = ""
        self._is_ready = False
        self._is_stopping = False
        self._reached = True

    def next_tick(self, status: str) -> float:
        """When the loop has to come by again, on its clock."""
        if not self._notifier.is_heard:
            return _NEVER
        if status != self._status or not self._is_ready:
            return min(self._ping_at, self._status_at)
        return self._ping_at

    def tick(self, now: float, status: str) -> None:
        """Says what is due."""
        if not self._notifier.is_heard or now < self.next_tick(status):
            return
        try:
            if not self._is_ready:
                self._notifier.ready(status)
                self._is_ready = True
            elif status != self._status:
                self._notifier.status(status)
            if now >= self._ping_at and self._ping_secs != _NEVER:
                self._notifier.watchdog()
            self._reached = True
        except OSError as error:
            self._unheard(error)
        self._status = status if self._reached else ""
        self._status_at = now + _STATUS_SECS
        if now >= self._ping_at:
            self._ping_at = now + (self._ping_secs if self._reached else min(self._ping_secs, _STATUS_SECS))

    def stopping(self, status: str) -> None:
        """STOPPING, once."""
        if self._is_stopping:
            return
        self._is_stopping = True
        try:
            self._notifier.stopping(status)
        except OSError as error:
            self._unheard(error)

    def _unheard(self, error: OSError) -> None:
        if self._reached:
            say(f"the service manager does not hear: {error.strerror or error}")
        self._reached = False
