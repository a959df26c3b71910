"""The measured parts of one job, on the server's clock (protocol.md, "Spans and metrics")."""

import msgspec
from gradient_protocol.kinds import SpanKind
from gradient_protocol.limits import MAX_SPANS
from gradient_protocol.messages.shapes import Span

from gradient_worker.server_clock import ServerClock

__all__ = ["SpanLog"]


class SpanLog:
    """Collects spans until the final report.

    They stay on this host's steady clock until then, so that what is learnt of the server's in between
    moves a span and never stretches it.
    """

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._spans: list[Span] = []
        self._dropped = 0

    def now(self) -> float:
        """An instant to pass to `add`, in seconds on the steady clock."""
        return self._clock.steady()

    def add(
        self,
        kind: SpanKind,
        start: float,
        *,
        end: float | None = None,
        parent: int | None = None,
        nar_bytes: int | None = None,
        stored_bytes: int | None = None,
        paths: int | None = None,
    ) -> int | None:
        """Record a span that ends now, or at `end`. Returns its index, None where it was dropped."""
        if len(self._spans) >= MAX_SPANS:
            self._dropped += 1
            return None
        span = Span(
            kind=kind,
            start=start,
            end=max(start, self.now() if end is None else end),
            parent=parent,
            nar_bytes=nar_bytes,
            stored_bytes=stored_bytes,
            paths=paths,
        )
        self._spans.append(span)
        return len(self._spans) - 1

    def take(self) -> tuple[list[Span], int]:
        """The spans, on the server's clock, and how many were dropped, for a final report."""
        at = self._clock.at
        spans = [
            msgspec.structs.replace(span, start=at(span.start), end=at(span.end)) for span in self._spans
        ]
        return spans, self._dropped
