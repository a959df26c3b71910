"""What is recorded of earlier runs, for predictions (scoring.md, "History and Closure Size")."""

from collections.abc import Iterable, Sequence
from typing import Final

import sqlalchemy as sa

from gradient_server.db.hot import HotStatement, array_of, execute_text, texts_in
from gradient_server.history.prediction import EVALUATION_PEAK_WINDOW_SECS, HISTORY_ROWS, MetricRow

__all__ = ["BuildIdentity", "build_identities", "evaluation_peaks", "metric_rows", "output_sizes"]

# (history name, architecture): what the history of builds is kept under.
BuildIdentity = tuple[str, str]

_ROWS: Final = HotStatement(
    "SELECT derivation, oom_killed, concurrent_builds, peak_ram_mb, cpu_time_ms, build_time_ms,"
    " CASE WHEN disk_read_bytes IS NULL AND disk_write_bytes IS NULL THEN NULL"
    " ELSE COALESCE(disk_read_bytes, 0) + COALESCE(disk_write_bytes, 0) END, cpu_core_score"
    " FROM derivation_metric WHERE history_name = :name AND architecture = :architecture"
    " AND created_at >= :since ORDER BY created_at DESC, id DESC LIMIT :rows"
)
_DERIVATIONS: Final = (
    "SELECT derivation, SUM(nar_size) FROM derivation_output WHERE {among}"
    " GROUP BY derivation HAVING COUNT(*) = COUNT(nar_size)"
)
_SIZES: Final = HotStatement(
    _DERIVATIONS.format(among="derivation IN (SELECT value FROM json_each(:derivations))"),
    _DERIVATIONS.format(among="derivation = ANY(CAST(:derivations AS bigint[]))"),
)
_PEAKS: Final = HotStatement(
    "SELECT peak_rss_mb FROM evaluation_metric WHERE task = :task AND created_at > :since"
    " AND peak_rss_mb IS NOT NULL"
)
_IDENTITIES: Final = tuple(
    "SELECT b.id, d.history_name, d.system, d.fixed_output IS NOT NULL, b.peak_ram_mb"  # noqa: S608 - own words
    f" FROM derivation_build b JOIN derivation d ON d.id = b.derivation WHERE {among}"
    for among in texts_in("b.id", "builds")
)
_OF_BUILDS: Final = HotStatement(*_IDENTITIES)


def metric_rows(connection: sa.Connection, identity: BuildIdentity, *, since: float) -> list[MetricRow]:
    """The newest rows of one history name and architecture, none older than `since`."""
    name, architecture = identity
    parameters = {"name": name, "architecture": architecture, "since": since, "rows": HISTORY_ROWS}
    return [
        MetricRow(
            derivation=row[0],
            oom_killed=bool(row[1]),
            concurrent_builds=row[2],
            peak_ram_mb=row[3],
            cpu_time_ms=row[4],
            build_time_ms=row[5],
            disk_bytes=None if row[6] is None else int(row[6]),
            cpu_core_score=row[7],
        )
        for row in execute_text(connection, _ROWS, parameters)
    ]


def output_sizes(connection: sa.Connection, derivations: Iterable[int]) -> dict[int, int]:
    """Bytes of all outputs of each derivation, of those where every output has a size."""
    wanted = sorted(set(derivations))
    if not wanted:
        return {}
    array = str(wanted) if connection.dialect.name == "sqlite" else wanted
    return {row[0]: int(row[1]) for row in execute_text(connection, _SIZES, {"derivations": array})}


def evaluation_peaks(connection: sa.Connection, task: str, *, now: float) -> list[float]:
    """Peaks (MiB) of a task's evaluations of the last day."""
    parameters = {"task": task, "since": now - EVALUATION_PEAK_WINDOW_SECS}
    return [float(row[0]) for row in execute_text(connection, _PEAKS, parameters)]


def build_identities(
    connection: sa.Connection, builds: Sequence[str]
) -> dict[str, tuple[BuildIdentity, bool, int | None]]:
    """Of each shared build: what its history is kept under, whether it is a download, its own peak (MiB)."""
    if not builds:
        return {}
    rows = execute_text(connection, _OF_BUILDS, {"builds": array_of(connection, builds)})
    return {row[0]: ((row[1], row[2]), bool(row[3]), row[4]) for row in rows}
