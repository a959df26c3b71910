"""The rows that prediction learns from (scoring.md, History and Closure Size)."""

from gradient_protocol.messages.shapes import EvalStats, Metrics

from gradient_server.graph import sql
from gradient_server.graph.assignments import Assignment
from gradient_server.graph.content import is_stored_integer, is_stored_time
from gradient_server.graph.work import Work

__all__ = ["store_build_metrics", "store_evaluation_metrics"]

_BUILD = sql.statement(
    "INSERT INTO derivation_metric (derivation, assignment, history_name, architecture,"
    " created_at, peak_ram_mb,"
    " anon_peak_ram_mb, peak_source, cpu_time_ms, avg_cpu_pct, disk_read_bytes,"
    " disk_write_bytes, build_time_ms,"
    " output_nar_size, closure_size, oom_killed, concurrent_builds, build_cores, cpu_core_score)"
    " SELECT d.id, :assignment, d.history_name, d.system, :now, :peak_ram_mb,"
    " :anon_peak_ram_mb, :peak_source,"
    " :cpu_time_ms, :avg_cpu_pct, :disk_read_bytes, :disk_write_bytes, :build_time_ms, :output_nar_size,"
    " d.closure_size, :oom_killed, :concurrent_builds, :build_cores, :cpu_core_score"
    " FROM derivation_build b JOIN derivation d ON d.id = b.derivation WHERE b.id = :build"
    " ON CONFLICT (assignment) DO NOTHING",
    "INSERT INTO derivation_metric (derivation, assignment, history_name, architecture,"
    " created_at, peak_ram_mb,"
    " anon_peak_ram_mb, peak_source, cpu_time_ms, avg_cpu_pct, disk_read_bytes,"
    " disk_write_bytes, build_time_ms,"
    " output_nar_size, closure_size, oom_killed, concurrent_builds, build_cores, cpu_core_score)"
    " SELECT d.id, CAST(:assignment AS TEXT), d.history_name, d.system, CAST(:now AS DOUBLE PRECISION),"
    " CAST(:peak_ram_mb AS BIGINT), CAST(:anon_peak_ram_mb AS BIGINT), CAST(:peak_source AS TEXT),"
    " CAST(:cpu_time_ms AS BIGINT), CAST(:avg_cpu_pct AS DOUBLE PRECISION), CAST(:disk_read_bytes AS BIGINT),"
    " CAST(:disk_write_bytes AS BIGINT), CAST(:build_time_ms AS BIGINT), CAST(:output_nar_size AS BIGINT),"
    " d.closure_size, CAST(:oom_killed AS BOOLEAN), CAST(:concurrent_builds AS INTEGER),"
    " CAST(:build_cores AS INTEGER), CAST(:cpu_core_score AS DOUBLE PRECISION)"
    " FROM derivation_build b JOIN derivation d ON d.id = b.derivation WHERE b.id = :build"
    " ON CONFLICT (assignment) DO NOTHING",
)
_EVALUATION = sql.statement(
    "INSERT INTO evaluation_metric (evaluation, assignment, task, created_at, derivations,"
    " known, wall_ms, cpu_ms,"
    " peak_rss_mb) SELECT v.id, :assignment, v.task, :now, :derivations, :known, :wall_ms,"
    " :cpu_ms, :peak_rss_mb"
    " FROM evaluation v WHERE v.id = :evaluation ON CONFLICT (assignment) DO NOTHING",
    "INSERT INTO evaluation_metric (evaluation, assignment, task, created_at, derivations,"
    " known, wall_ms, cpu_ms,"
    " peak_rss_mb) SELECT v.id, CAST(:assignment AS TEXT), v.task, CAST(:now AS DOUBLE PRECISION),"
    " CAST(:derivations AS INTEGER), CAST(:known AS INTEGER), CAST(:wall_ms AS BIGINT),"
    " CAST(:cpu_ms AS BIGINT),"
    " CAST(:peak_rss_mb AS BIGINT) FROM evaluation v WHERE v.id = :evaluation ON CONFLICT"
    " (assignment) DO NOTHING",
)
_INT32_MAX = (1 << 31) - 1


def store_build_metrics(
    work: Work, assignment: Assignment, metrics: Metrics, output_nar_size: int | None
) -> None:
    """One row for a real build, or for one that was killed for want of memory."""
    parameters = {
        "build": assignment.job,
        "assignment": assignment.id,
        "now": work.now,
        "peak_ram_mb": _integer(metrics.peak_ram_mb),
        "anon_peak_ram_mb": _integer(metrics.anon_peak_ram_mb),
        "peak_source": None if metrics.peak_source is None else metrics.peak_source.value,
        "cpu_time_ms": _integer(metrics.cpu_time_ms),
        "avg_cpu_pct": _number(metrics.avg_cpu_pct),
        "disk_read_bytes": _integer(metrics.disk_read_bytes),
        "disk_write_bytes": _integer(metrics.disk_write_bytes),
        "build_time_ms": _integer(metrics.build_time_ms),
        "output_nar_size": output_nar_size,
        "oom_killed": metrics.oom_killed,
        "concurrent_builds": _small(metrics.concurrent_builds) or 0,
        "build_cores": _small(metrics.build_cores),
        "cpu_core_score": _number(metrics.cpu_core_score),
    }
    sql.run(work.connection, _BUILD, parameters)


def store_evaluation_metrics(work: Work, assignment: Assignment, stats: EvalStats) -> None:
    """One row for an evaluation's walk."""
    parameters = {
        "evaluation": assignment.job,
        "assignment": assignment.id,
        "now": work.now,
        "derivations": _small(stats.derivations) or 0,
        "known": _small(stats.known) or 0,
        "wall_ms": _integer(stats.wall_ms) or 0,
        "cpu_ms": _integer(stats.cpu_ms) or 0,
        "peak_rss_mb": _integer(stats.peak_rss_mb),
    }
    sql.run(work.connection, _EVALUATION, parameters)


def _integer(value: int | None) -> int | None:
    return value if value is not None and is_stored_integer(value) else None


def _small(value: int | None) -> int | None:
    return value if value is not None and 0 <= value <= _INT32_MAX else None


def _number(value: float | None) -> float | None:
    return value if value is not None and is_stored_time(value) else None
