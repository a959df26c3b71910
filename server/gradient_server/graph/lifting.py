"""Builds that an evaluation waits on (`ifd`): lifted while it waits, lowered when none does (scoring.md).

Lifted are the builds of the open import requests and whatever is unfinished below them. Those that wait
for a worker are announced again, for the mark is among what they are ranked by.
"""

from collections.abc import Sequence

from gradient_server.domain.status import BuildStatus
from gradient_server.graph import sql
from gradient_server.graph.progress import announce_queued
from gradient_server.graph.work import Work

__all__ = ["lift_imported", "lower_imported"]

_LIFT = sql.statement(
    "WITH RECURSIVE below(id) AS (SELECT b.derivation FROM derivation_build b WHERE b.id IN [ids]"
    " UNION SELECT e.dependency FROM below JOIN derivation_dependency e ON e.derivation = below.id"
    " AND NOT e.runtime_only)"
    " UPDATE derivation_build SET ifd = TRUE WHERE finished_at IS NULL AND NOT ifd"
    " AND derivation IN (SELECT id FROM below) RETURNING id, status"
)
_LOWER = sql.statement(
    "WITH RECURSIVE below(id) AS (SELECT b.derivation FROM import_request r"
    " JOIN derivation_build b ON b.id = r.build WHERE r.result IS NULL"
    " UNION SELECT e.dependency FROM below JOIN derivation_dependency e ON e.derivation = below.id"
    " AND NOT e.runtime_only)"
    " UPDATE derivation_build SET ifd = FALSE WHERE finished_at IS NULL AND ifd"
    " AND status IN ('Created', 'Queued', 'Assigned')"
    " AND derivation NOT IN (SELECT id FROM below) RETURNING id, status"
)


def lift_imported(work: Work, builds: Sequence[str]) -> None:
    """An evaluation waits on these builds from now on."""
    if builds:
        _announce(work, sql.run(work.connection, _LIFT, {"ids": sql.array(work.connection, builds)}))


def lower_imported(work: Work) -> None:
    """An evaluation waits no more: what no open request needs any longer is ordinary again."""
    _announce(work, sql.run(work.connection, _LOWER))


def _announce(work: Work, changed: Sequence[tuple[str, str]]) -> None:
    announce_queued(work, [build for build, status in changed if status == BuildStatus.QUEUED])
