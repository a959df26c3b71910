"""What the instance has measured lately, aggregated in the database (scoring.md, "Instance Windows").

Every function is one statement over a range of time, which an index serves; times are wall seconds,
NaN is "no samples". Workers' figures that cannot be true (a span from the future, a petabyte) are left
out, so that no single worker can spoil what all jobs are ranked by.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa
from gradient_protocol.kinds import SpanKind

from gradient_server.db.hot import HotStatement, execute_text
from gradient_server.db.tables.dispatch import WINDOW_SPANS
from gradient_server.history.sums import BuildSums, EvalSums, FitSums, WaitSums

__all__ = [
    "build_averages",
    "eval_sums",
    "fit_sums",
    "median_build_time_ms",
    "peak_throughput_mbps",
    "stored_to_nar_ratio",
    "wait_averages",
]

# The server and a worker may disagree about the time by this much.
_CLOCK_SLACK_SECS: Final = 60.0
_SHORTEST_SPAN_SECS: Final = 0.001
# No link or disk moves more than 10^6 Mbit/s (domain/plausible.py), however short the span.
_MOST_BYTES: Final = '125000000000.0 * (CASE WHEN "end" - start < 0.001 THEN 0.001 ELSE "end" - start END)'
_PLAUSIBLE_SPAN: Final = (
    f"kind IN ({WINDOW_SPANS}) AND kind = :kind"
    ' AND "end" > :since AND "end" <= :until AND start > "end" - 604800.0'
    " AND (nar_bytes IS NULL OR nar_bytes <= 100000000000000)"
    " AND (stored_bytes IS NULL OR stored_bytes <= 100000000000000)"
    f" AND (nar_bytes IS NULL OR nar_bytes <= {_MOST_BYTES})"
    f" AND (stored_bytes IS NULL OR stored_bytes <= {_MOST_BYTES})"
    " AND (paths IS NULL OR paths <= 10000000)"
)


def _double(column: str) -> str:
    return f"CAST({column} AS DOUBLE PRECISION)"


_IN_RANGE: Final = "created_at > :since AND created_at <= :until"
_BUILD_COLUMNS: Final = (
    f"AVG({_double('peak_ram_mb')}), AVG({_double('cpu_time_ms')}), AVG(avg_cpu_pct),"
    f" AVG(CASE WHEN disk_read_bytes IS NULL AND disk_write_bytes IS NULL THEN NULL"
    f" ELSE COALESCE({_double('disk_read_bytes')}, 0) + COALESCE({_double('disk_write_bytes')}, 0) END),"
    f" AVG({_double('build_time_ms')}), AVG({_double('closure_size')}),"
    " AVG(CASE WHEN oom_killed THEN 1.0 ELSE 0.0 END),"
    " COUNT(CASE WHEN build_time_ms IS NOT NULL AND NOT oom_killed THEN 1 END)"
)
_BUILDS: Final = HotStatement(f"SELECT {_BUILD_COLUMNS} FROM derivation_metric WHERE {_IN_RANGE}")  # noqa: S608 - own words
_TIMES: Final = f"FROM derivation_metric WHERE {_IN_RANGE} AND build_time_ms IS NOT NULL"
# Apart from the averages, which PostgreSQL can then share out among its workers.
_MEDIAN: Final = HotStatement(
    f"SELECT AVG(build_time_ms) FROM (SELECT build_time_ms {_TIMES} ORDER BY build_time_ms"  # noqa: S608 - own words
    f" LIMIT 2 - (SELECT COUNT(*) {_TIMES}) % 2 OFFSET MAX((SELECT COUNT(*) {_TIMES}) - 1, 0) / 2)",
    f"SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY build_time_ms) {_TIMES}",
)
# The conditions are those of the index, word for word, or SQLite would not use it.
_WAITS: Final = HotStatement(
    "SELECT AVG(CASE WHEN assigned_at > ready_at THEN assigned_at - ready_at ELSE 0.0 END),"  # noqa: S608 - own words
    f" AVG(CASE WHEN missing_nar_size <= 100000000000000 THEN {_double('missing_nar_size')} / 1048576.0 END),"
    f" AVG(CASE WHEN missing_count <= 10000000 THEN {_double('missing_count')} END),"
    f" AVG({_double('dependency_count')})"
    " FROM dispatched_job WHERE derivation_build IS NOT NULL AND ready_at IS NOT NULL"
    " AND cluster_role IS NULL AND assigned_at > :since AND assigned_at <= :until"
)
# A span's rate counts between its start and its end; at one moment ends go before starts.
_PEAK: Final = HotStatement(
    'WITH spans AS (SELECT start, CASE WHEN "end" - start < :shortest THEN start + :shortest'  # noqa: S608 - own words
    f' ELSE "end" END AS stop, {_double("stored_bytes")} * 8e-6 AS mbit FROM span'
    f" WHERE {_PLAUSIBLE_SPAN} AND stored_bytes IS NOT NULL),"
    " steps AS (SELECT start AS at, mbit / (stop - start) AS change FROM spans"
    " UNION ALL SELECT stop, -mbit / (stop - start) FROM spans)"
    " SELECT MAX(total) FROM (SELECT SUM(change) OVER"
    " (ORDER BY at, change ROWS UNBOUNDED PRECEDING) AS total FROM steps) AS totals"
)
_FIT: Final = HotStatement(
    "SELECT COUNT(*), SUM(mb), SUM(paths), SUM(secs), SUM(mb * mb), SUM(mb * paths), SUM(paths * paths),"  # noqa: S608 - own words
    f" SUM(mb * secs), SUM(paths * secs) FROM (SELECT {_double('nar_bytes')} / 1e6 AS mb,"
    f' {_double("COALESCE(paths, 1)")} AS paths, "end" - start AS secs FROM span'
    f" WHERE {_PLAUSIBLE_SPAN} AND nar_bytes IS NOT NULL) AS samples"
)
_RATIO: Final = HotStatement(
    f"SELECT SUM({_double('push.stored_bytes')}), SUM({_double('packed.nar_bytes')})"  # noqa: S608 - own words
    f" FROM (SELECT assignment, parent, stored_bytes FROM span WHERE {_PLAUSIBLE_SPAN}"
    " AND stored_bytes IS NOT NULL AND parent IS NOT NULL) AS push"
    " JOIN span AS packed ON packed.assignment = push.assignment AND packed.position = push.parent"
    " WHERE packed.kind = 'Compress' AND packed.nar_bytes > 0 AND packed.nar_bytes <= 100000000000000"
)
_EVALUATIONS: Final = HotStatement(
    "SELECT task, COUNT(fetch_secs), SUM(fetch_secs),"
    " COUNT(CASE WHEN walked THEN 1 END),"
    " SUM(CASE WHEN walked AND total_secs > COALESCE(fetch_secs, 0.0)"
    " THEN total_secs - COALESCE(fetch_secs, 0.0) WHEN walked THEN 0.0 END)"
    " FROM (SELECT e.task AS task, a.finished_at - COALESCE(a.accepted_at, a.assigned_at) AS total_secs,"
    " (SELECT SUM(s.\"end\" - s.start) FROM span s WHERE s.assignment = a.id AND s.kind = 'Fetch'"
    ' AND s.parent IS NULL AND s.start > s."end" - 604800.0) AS fetch_secs,'
    " EXISTS (SELECT 1 FROM span s WHERE s.assignment = a.id AND s.kind = 'Evaluation') AS walked"
    " FROM dispatched_job a JOIN evaluation e ON e.id = a.evaluation"
    " WHERE a.evaluation IS NOT NULL AND a.finished_at > :since AND a.finished_at <= :until"
    " AND a.status = 'Completed' AND a.cluster_role IS NULL) AS runs GROUP BY task"
)


def build_averages(connection: sa.Connection, *, since: float, until: float) -> BuildSums:
    """Real builds recorded in (since, until]."""
    [row] = execute_text(connection, _BUILDS, {"since": since, "until": until})
    return BuildSums(*map(_known, row))


def median_build_time_ms(connection: sa.Connection, *, since: float, until: float) -> float:
    """Of the real builds recorded in (since, until]."""
    [row] = execute_text(connection, _MEDIAN, {"since": since, "until": until})
    return _known(row[0])


def wait_averages(connection: sa.Connection, *, since: float, until: float) -> WaitSums:
    """Builds assigned in (since, until], cluster members apart: these wait for each other."""
    [row] = execute_text(connection, _WAITS, {"since": since, "until": until})
    return WaitSums(*map(_known, row))


def peak_throughput_mbps(connection: sa.Connection, kind: SpanKind, *, since: float, now: float) -> float:
    """The highest sum of the rates (Mbit/s of stored bytes) of spans that overlap; they end after `since`."""
    parameters = {**_of_spans(kind, since, now), "shortest": _SHORTEST_SPAN_SECS}
    [row] = execute_text(connection, _PEAK, parameters)
    return _known(row[0])


def fit_sums(connection: sa.Connection, kind: SpanKind, *, since: float, now: float) -> FitSums:
    """Over the spans of a kind that end after `since`; a span that names no paths moved one."""
    [row] = execute_text(connection, _FIT, _of_spans(kind, since, now))
    return FitSums(row[0], *(float(value or 0.0) for value in row[1:]))


def stored_to_nar_ratio(connection: sa.Connection, *, since: float, now: float) -> float:
    """Bytes pushed for each NAR byte packed, over the uploads that end after `since`."""
    [row] = execute_text(connection, _RATIO, _of_spans(SpanKind.NAR_PUSH, since, now))
    stored, packed = _known(row[0]), _known(row[1])
    return stored / packed


def eval_sums(connection: sa.Connection, *, since: float, until: float) -> Mapping[str, EvalSums]:
    """By task, over the evaluation jobs completed in (since, until]."""
    rows = execute_text(connection, _EVALUATIONS, {"since": since, "until": until})
    return {row[0]: EvalSums(row[1], float(row[2] or 0.0), row[3], float(row[4] or 0.0)) for row in rows}


def _of_spans(kind: SpanKind, since: float, now: float) -> dict[str, Any]:
    return {"kind": kind.value, "since": since, "until": now + _CLOCK_SLACK_SECS}


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)
