"""`/metrics` for Prometheus: counters kept as things happen, and gauges of the moment."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gradient_server.cluster.figures import ClusterFigures
from gradient_server.db.tables import (
    cluster_attempt,
    cluster_job,
    derivation_build,
    dispatched_job,
    evaluation,
)
from gradient_server.domain.sweeps import Sweep, SweepFigures
from gradient_server.net.services import Services
from gradient_server.scheduler.snapshot import PoolSnapshot, WorkerSnapshot
from gradient_server.web.auth import Overseer
from gradient_server.web.cluster_metrics import cluster_metrics
from gradient_server.web.state import WebDep

__all__ = ["Facts", "FactsCollector", "RowCounts", "router"]

router = APIRouter(tags=["metrics"])

# Rows are counted at most so often: a table of a million takes its time.
COUNT_EVERY_SECS: Final = 15.0

Counts = dict[str, int]


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the database counts. Taken at a monotonic time."""

    taken_at: float
    builds: Counts
    evaluations: Counts
    assignments: Counts
    clusters: Counts
    attempts: Counts


@dataclass(frozen=True, slots=True)
class Facts:
    """What a scrape shows of the moment."""

    pool: PoolSnapshot
    clusters: ClusterFigures
    rows: _Rows
    decisions: int
    sessions: int
    downloads: int
    watchers: int
    sweeps: SweepFigures


class FactsCollector(Collector):
    """Shows the facts of the last scrape, which sets them just before."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.facts: Facts | None = None
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Every gauge."""
        if self.facts is not None:
            yield from _metrics(self.facts)


def _metrics(facts: Facts) -> Iterator[Metric]:
    pool, rows = facts.pool, facts.rows
    states: Counts = {"connected": 0, "draining": 0}
    for worker in pool.workers:
        states["connected" if worker.draining is None else "draining"] += 1
    yield _gauge("gradient_workers", "Connected workers.", "state", states)
    yield _gauge("gradient_pending_jobs", "Jobs that could start now.", "kind", pool.pending)
    yield GaugeMetricFamily("gradient_held_back_jobs", "Jobs that wait after a failure.", pool.held_back)
    yield GaugeMetricFamily(
        "gradient_assignments_away", "Assignments whose worker is not connected.", len(pool.away)
    )
    yield _gauge("gradient_builds", "Builds, ever.", "status", rows.builds)
    yield _gauge("gradient_evaluations", "Evaluations, ever.", "status", rows.evaluations)
    yield _gauge(
        "gradient_assignments",
        "Assignments, ever; open: Assigned, Accepted.",
        "outcome",
        rows.assignments,
    )
    yield CounterMetricFamily("gradient_decisions", "Answers to RequestJob and kicks.", facts.decisions)
    yield GaugeMetricFamily("gradient_sessions", "Authenticated sessions of workers.", facts.sessions)
    yield GaugeMetricFamily("gradient_downloads", "NARs on their way to workers.", facts.downloads)
    yield GaugeMetricFamily("gradient_http_watchers", "Open event streams.", facts.watchers)
    yield from _sweep_metrics(facts.sweeps)
    yield from cluster_metrics(facts.clusters, rows.clusters, rows.attempts)
    yield from _worker_metrics(pool.workers)


def _sweep_metrics(figures: SweepFigures) -> Iterator[Metric]:
    passes = CounterMetricFamily("gradient_sweep_passes", "Passes of a sweep that ended.", labels=["sweep"])
    found = CounterMetricFamily(
        "gradient_sweep_found", "What a sweep closed, repaired or deleted.", labels=["sweep"]
    )
    failures = CounterMetricFamily("gradient_sweep_failures", "Passes that failed.", labels=["sweep"])
    for sweep in Sweep:
        passes.add_metric([sweep], figures.passes[sweep])
        found.add_metric([sweep], figures.found[sweep])
        failures.add_metric([sweep], figures.failures[sweep])
    yield from (passes, found, failures)


def _worker_metrics(workers: Iterable[WorkerSnapshot]) -> Iterator[Metric]:
    slots = GaugeMetricFamily("gradient_worker_slots", "Slots.", labels=["worker", "kind"])
    used = GaugeMetricFamily("gradient_worker_slots_used", "Slots in use.", labels=["worker", "kind"])
    late = GaugeMetricFamily(
        "gradient_worker_heartbeat_lateness_seconds", "As the worker measured it.", labels=["worker"]
    )
    free = GaugeMetricFamily("gradient_worker_ram_free_mebibytes", "Free memory.", labels=["worker"])
    for worker in workers:
        for kind, one in worker.slots.items():
            slots.add_metric([worker.name, kind], one.maximum)
            used.add_metric([worker.name, kind], one.open)
        if worker.heartbeat_lateness_secs is not None:
            late.add_metric([worker.name], worker.heartbeat_lateness_secs)
        if worker.ram_free_mb is not None:
            free.add_metric([worker.name], worker.ram_free_mb)
    yield from (slots, used, late, free)


def _gauge(name: str, text: str, label: str, counts: Counts) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


class RowCounts:
    """Counts rows, and remembers the counts for a while."""

    def __init__(self) -> None:
        self._last: _Rows | None = None

    async def get(self, services: Services) -> _Rows:
        """At most 15 s old."""
        now = services.clock.monotonic()
        if self._last is None or now - self._last.taken_at >= COUNT_EVERY_SECS:
            counts = await services.database.read(_count)
            self._last = _Rows(now, *counts)
        return self._last


def _count(connection: sa.Connection) -> tuple[Counts, Counts, Counts, Counts, Counts]:
    return (
        _by(connection, derivation_build.c.status),
        _by(connection, evaluation.c.status),
        _by(connection, dispatched_job.c.status),
        _by(connection, cluster_job.c.status),
        _by(connection, cluster_attempt.c.outcome),
    )


def _by(connection: sa.Connection, column: sa.Column[str]) -> Counts:
    query = sa.select(column, sa.func.count()).where(column.is_not(None)).group_by(column).order_by(column)
    return {value: number for value, number in connection.execute(query).all()}  # noqa: C416 - rows are no pairs to mypy


_TEXT: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.get("/metrics", response_class=Response, responses=_TEXT)
async def get_metrics(web: WebDep, _access: Overseer) -> Response:
    """For Prometheus."""
    services = web.services
    rows = await web.rows.get(services)
    web.facts.facts = Facts(
        pool=services.scheduler.snapshot(),
        clusters=services.clusters.figures(),
        rows=rows,
        decisions=services.scheduler.decisions.made,
        sessions=len(services.sessions),
        downloads=services.downloads.running,
        watchers=web.hub.count,
        sweeps=services.sweep_figures,
    )
    return Response(generate_latest(web.registry), media_type=CONTENT_TYPE_LATEST)
