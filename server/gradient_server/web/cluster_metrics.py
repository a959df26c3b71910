"""Clusters in `/metrics`."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gradient_server.cluster.figures import ClusterFigures

__all__ = ["cluster_metrics"]

Counts = Mapping[str, int]


def cluster_metrics(figures: ClusterFigures, clusters: Counts, attempts: Counts) -> Iterator[Metric]:
    """`clusters` by status and `attempts` by outcome as the rows count them, ever."""
    yield _gauge("gradient_clusters", "Clusters, ever.", "status", clusters)
    yield _gauge("gradient_cluster_attempts", "Tries of clusters that have ended, ever.", "outcome", attempts)
    yield _gauge(
        "gradient_waiting_clusters",
        "Clusters that wait at this server, by what for: members that cannot start, a backoff, seats.",
        "for",
        figures.waiting,
    )
    yield _gauge(
        "gradient_open_cluster_attempts", "Tries under way at this server.", "state", figures.attempts
    )
    yield CounterMetricFamily("gradient_cluster_starts", "Tries whose members all started.", figures.started)
    yield CounterMetricFamily(
        "gradient_cluster_failed_prepares", "Tries that ended before their start.", figures.prepares_failed
    )
    yield CounterMetricFamily(
        "gradient_cluster_signals_forwarded", "Signals sent on to members.", figures.signals_forwarded
    )
    yield CounterMetricFamily(
        "gradient_cluster_signals_dropped",
        "Signals outside a started try, from a non-member or to one who is none.",
        figures.signals_dropped,
    )
    yield GaugeMetricFamily(
        "gradient_reserved_seats", "Seats that a cluster has reserved.", figures.seats_reserved
    )
    held = GaugeMetricFamily("gradient_reservation_age_seconds", "How long they have been reserved.")
    if figures.reserved_secs is not None:
        held.add_metric([], figures.reserved_secs)
    yield held


def _gauge(name: str, text: str, label: str, counts: Counts) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
