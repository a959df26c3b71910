"""Where clusters stand, as server-sent events (`gradient cluster submit --wait` shows it).

`cluster` comes for each cluster first, and then as often as something of it changes: it is what `why`
answers, whole, so a reader that missed some has missed nothing. `evaluation` comes where the clusters
of an evaluation are watched, at first and when its status changes. The stream ends when all have ended.

What is in memory is looked at twice a second; the database is asked again when the bus told of
something that may concern the clusters, and now and then, for other servers have a say too.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa
import trio

from gradient_server.db.tables import evaluation as evaluation_table
from gradient_server.domain.events import (
    AssignmentClosed,
    BuildChanged,
    ClusterChanged,
    ClusterQueued,
    EvaluationChanged,
    Event,
    MemberReported,
)
from gradient_server.domain.status import EvaluationStatus
from gradient_server.graph.cluster_views import (
    ClusterSummary,
    MemberView,
    cluster_members,
    clusters_of_evaluation,
    find_clusters,
)
from gradient_server.net.services import Services
from gradient_server.web.auth import Access
from gradient_server.web.cluster_why import FINAL, cluster_why
from gradient_server.web.events import sse
from gradient_server.web.hub import Hub

__all__ = ["ClusterStream", "Watched", "clusters_named", "wanted_by_evaluation"]

LOOK_EVERY_SECS: Final = 0.5
REREAD_SECS: Final = 5.0
KEEP_ALIVE_SECS: Final = 15.0
# Lengths of time pass by themselves; alone they are told again so often.
TELL_TIMES_EVERY_SECS: Final = 5.0
_TIMES: Final = frozenset({"summary", "reservation", "waiting_secs", "retry_secs", "expected_start_secs"})
_OF_INTEREST: Final = (
    AssignmentClosed,
    BuildChanged,
    ClusterChanged,
    ClusterQueued,
    EvaluationChanged,
    MemberReported,
)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Watched:
    """What is stored: clusters with their members, and the evaluation that is watched, if one is."""

    clusters: list[tuple[ClusterSummary, list[MemberView]]]
    evaluation: Json | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it will change."""
        evaluation = self.evaluation
        if evaluation is not None and not EvaluationStatus(evaluation["status"]).is_final:
            return False
        return all(summary.status in FINAL for summary, _ in self.clusters)


Select = Callable[[sa.Connection], Watched]


def clusters_named(cluster_id: str) -> Select:
    """One cluster, by its id."""

    def select(connection: sa.Connection) -> Watched:
        return _watched(connection, find_clusters(connection, cluster_id, None)[:1])

    return select


def wanted_by_evaluation(evaluation_id: str) -> Select:
    """Those of which the evaluation wants a member, and how the evaluation itself stands."""
    row = evaluation_table.c
    query = sa.select(row.status, row.error).where(row.id == evaluation_id)

    def select(connection: sa.Connection) -> Watched:
        found = connection.execute(query).first()
        status = None if found is None else {"id": evaluation_id, "status": found[0], "error": found[1]}
        return _watched(connection, clusters_of_evaluation(connection, evaluation_id), status)

    return select


def _watched(
    connection: sa.Connection, summaries: Sequence[ClusterSummary], evaluation: Json | None = None
) -> Watched:
    clusters = [(summary, cluster_members(connection, summary.id)) for summary in summaries]
    return Watched(clusters, evaluation)


@dataclass(slots=True)
class _Told:
    """What a reader knows of a cluster, and since when."""

    standing: Json = field(default_factory=dict)
    at: float = 0.0


class ClusterStream:
    """One reader's stream."""

    def __init__(self, services: Services, hub: Hub, select: Select, access: Access) -> None:
        self._services = services
        self._hub = hub
        self._select = select
        self._access = access
        self._told: dict[str, _Told] = {}
        self._evaluation: Json | None = None
        self._stale = True

    async def run(self) -> AsyncGenerator[bytes, None]:
        """Until all has ended, or the server stops."""
        clock = self._services.clock
        watched = Watched([])
        read_at = told_at = clock.monotonic()
        # Counted with all others who watch.
        with self._hub.watch("clusters"), self._subscribed():
            while not self._services.draining.is_set():
                if self._stale or clock.monotonic() - read_at >= REREAD_SECS:
                    # What is told while it is read counts for the next time.
                    self._stale = False
                    read_at = clock.monotonic()
                    watched = await self._services.database.read(self._select)
                chunks = list(self._news(watched, clock.monotonic()))
                if chunks:
                    told_at = clock.monotonic()
                    yield b"".join(chunks)
                if watched.has_ended:
                    return
                if clock.monotonic() - told_at >= KEEP_ALIVE_SECS:
                    told_at = clock.monotonic()
                    yield b": still here\n\n"
                await trio.sleep(LOOK_EVERY_SECS)

    @contextmanager
    def _subscribed(self) -> Iterator[None]:
        bus = self._services.bus
        bus.subscribe(self._on_event)
        try:
            yield
        finally:
            bus.unsubscribe(self._on_event)

    def _on_event(self, event: Event) -> None:
        self._stale = self._stale or isinstance(event, _OF_INTEREST)

    def _news(self, watched: Watched, now: float) -> Iterator[bytes]:
        """What the reader does not know yet."""
        for summary, members in watched.clusters:
            standing = cluster_why(self._services, summary, members, self._access).model_dump()
            told = self._told.setdefault(summary.id, _Told())
            if standing == told.standing:
                continue
            if _lasting(standing) != _lasting(told.standing) or now - told.at >= TELL_TIMES_EVERY_SECS:
                told.standing, told.at = standing, now
                yield sse("cluster", standing)
        if watched.evaluation is not None and watched.evaluation != self._evaluation:
            self._evaluation = watched.evaluation
            yield sse("evaluation", watched.evaluation)


def _lasting(standing: Json) -> Json:
    return {name: value for name, value in standing.items() if name not in _TIMES}
