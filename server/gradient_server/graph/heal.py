"""Healing: a worker could not get an input that the server thought it held (protocol.md, Failure kinds).

The path is forgotten and the build that makes it is reset. So is every build between it and the one
that failed, for that one must wait until the path is back; those between still have their outputs, and
are Completed again without a worker once their turn comes.
"""

from collections.abc import Iterable, Sequence

from gradient_server.domain.events import PathForgotten
from gradient_server.graph import sql
from gradient_server.graph.progress import advance, reset_builds
from gradient_server.graph.work import Work

__all__ = ["forget_paths", "heal", "missing_paths"]

# What a build may miss: the outputs and sources of what is below it, and the references of these.
_BELOW = (
    "WITH RECURSIVE below(id) AS (SELECT e.dependency FROM derivation_dependency e WHERE"
    " e.derivation IN [derivations]"
    " UNION SELECT e.dependency FROM below JOIN derivation_dependency e ON e.derivation = below.id)"
)
_MADE_BELOW = sql.statement(
    _BELOW  # noqa: S608 - own words only
    + " SELECT DISTINCT o.path FROM derivation_output o JOIN below ON below.id = o.derivation"
    " WHERE o.path IN [paths] ORDER BY o.path"
)
_OWN_SOURCES = sql.statement(
    "SELECT DISTINCT path FROM derivation_source WHERE derivation IN [derivations] AND path"
    " IN [paths] ORDER BY path"
)
_FORGET = sql.statement("DELETE FROM cached_path WHERE path IN [paths] RETURNING path")
_TO_RESET = sql.statement(
    _BELOW  # noqa: S608 - own words only
    + ", up(id) AS (SELECT o.derivation FROM derivation_output o JOIN below ON below.id = o.derivation"
    "  WHERE o.path IN [paths]"
    " UNION SELECT e.derivation FROM up JOIN derivation_dependency e ON e.dependency = up.id"
    " AND NOT e.runtime_only"
    "  JOIN below ON below.id = e.derivation)"
    # CROSS JOIN: SQLite keeps to this order; by itself it reads every build, in that of their ids.
    " SELECT b.id FROM up CROSS JOIN derivation_build b WHERE b.derivation = up.id"
    " AND b.status = 'Completed' ORDER BY b.id"
)


def missing_paths(
    work: Work, derivations: Sequence[int], reported: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Which of the paths that a worker reports as missing these derivations need: (built, sources).

    Anything else it names is ignored, so that no report can make the server forget at will.
    """
    parameters = {
        "derivations": sql.array(work.connection, derivations),
        "paths": sql.array(work.connection, sorted(set(reported))),
    }
    made = [row[0] for row in sql.run(work.connection, _MADE_BELOW, parameters)]
    sources = [row[0] for row in sql.run(work.connection, _OWN_SOURCES, parameters)]
    return made, [path for path in sources if path not in made]


def forget_paths(work: Work, paths: Sequence[str]) -> None:
    """The server no longer holds these."""
    if not paths:
        return
    for row in sql.run(work.connection, _FORGET, {"paths": sql.array(work.connection, paths)}):
        work.events.append(PathForgotten(row[0]))


def heal(work: Work, derivations: Sequence[int], made: Sequence[str]) -> None:
    """Forgets the paths of `made` and has what makes them, below `derivations`, built again."""
    if not made:
        return
    forget_paths(work, made)
    parameters = {
        "derivations": sql.array(work.connection, derivations),
        "paths": sql.array(work.connection, made),
    }
    lost = [row[0] for row in sql.run(work.connection, _TO_RESET, parameters)]
    advance(work, reset_builds(work, lost))
