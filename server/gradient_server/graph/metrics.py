"""The rows that prediction learns from (scoring.md, History and Closure Size)."""

from collections.abc import Mapping
from typing import Any

import structlog
from gradient_protocol.messages.shapes import EvalStats, Metrics

from gradient_server.domain.plausible import (
    MAX_BYTES,
    MAX_CORE_SCORE,
    MAX_CPU_PCT,
    MAX_RAM_MB,
    MAX_TIME_MS,
    plausible,
)
from gradient_server.graph import sql
from gradient_server.graph.assignments import Assignment
from gradient_server.graph.work import Work

__all__ = ["store_build_metrics", "store_evaluation_metrics", "store_lost_peak"]

log = structlog.get_logger(__name__)

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
# Figures of a row by its columns, and what they may be at most.
_BUILD_FIGURES = {
    "peak_ram_mb": MAX_RAM_MB,
    "anon_peak_ram_mb": MAX_RAM_MB,
    "cpu_time_ms": _INT32_MAX * 1000,
    "avg_cpu_pct": MAX_CPU_PCT,
    "disk_read_bytes": MAX_BYTES,
    "disk_write_bytes": MAX_BYTES,
    "build_time_ms": MAX_TIME_MS,
    "concurrent_builds": _INT32_MAX,
    "build_cores": _INT32_MAX,
    "cpu_core_score": MAX_CORE_SCORE,
}
_EVALUATION_FIGURES = {
    "derivations": _INT32_MAX,
    "known": _INT32_MAX,
    "wall_ms": MAX_TIME_MS,
    "cpu_ms": _INT32_MAX * 1000,
    "peak_rss_mb": MAX_RAM_MB,
}


def store_build_metrics(
    work: Work, assignment: Assignment, metrics: Metrics, output_nar_size: int | None
) -> None:
    """One row for a real build, or for one that was killed for want of memory."""
    figures = _believed(assignment, metrics, _BUILD_FIGURES)
    parameters = {
        **figures,
        "build": assignment.job,
        "assignment": assignment.id,
        "now": work.now,
        "peak_source": None if metrics.peak_source is None else metrics.peak_source.value,
        "output_nar_size": output_nar_size,
        "oom_killed": metrics.oom_killed,
        "concurrent_builds": figures["concurrent_builds"] or 0,
    }
    sql.run(work.connection, _BUILD, parameters)


def store_lost_peak(work: Work, assignment: Assignment, peak_ram_mb: int) -> None:
    """One row for a build that was lost with its worker: the memory (MiB) it was last seen with."""
    parameters = {
        **dict.fromkeys(_BUILD_FIGURES),
        "build": assignment.job,
        "assignment": assignment.id,
        "now": work.now,
        "peak_ram_mb": peak_ram_mb,
        "peak_source": None,
        "output_nar_size": None,
        "oom_killed": False,
        "concurrent_builds": 0,
    }
    sql.run(work.connection, _BUILD, parameters)


def store_evaluation_metrics(work: Work, assignment: Assignment, stats: EvalStats) -> None:
    """One row for an evaluation's walk."""
    figures = _believed(assignment, stats, _EVALUATION_FIGURES)
    parameters = {
        **{name: value or 0 for name, value in figures.items()},
        "evaluation": assignment.job,
        "assignment": assignment.id,
        "now": work.now,
        "peak_rss_mb": figures["peak_rss_mb"],
    }
    sql.run(work.connection, _EVALUATION, parameters)


def _believed(
    assignment: Assignment, reported: Metrics | EvalStats, figures: Mapping[str, float]
) -> dict[str, Any]:
    """The reported figures by name; one that cannot be true is None, with one line in the log."""
    given = {name: getattr(reported, name) for name in figures}
    believed = {name: plausible(value, figures[name]) for name, value in given.items()}
    if believed != given:
        doubted = {name: value for name, value in given.items() if value != believed[name]}
        log.warning(
            "figures that cannot be true are left out",
            assignment=assignment.id,
            worker=assignment.worker_name,
            figures=doubted,
        )
    return believed
