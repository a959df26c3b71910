"""Runtime closures of store paths, from the references of what the server holds. Batched."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import sqlalchemy as sa
from gradient_protocol.messages.server import RequiredPath

from gradient_server.graph import sql

__all__ = ["Closures", "HeldPath", "load_closures"]

_PATHS = sql.statement(
    "WITH RECURSIVE c(path) AS (SELECT p.path FROM cached_path p WHERE p.path IN [roots]"
    " UNION SELECT r.reference FROM c JOIN cached_path_reference r ON r.path = c.path)"
    " SELECT p.path, p.nar_hash, p.nar_size FROM c JOIN cached_path p ON p.path = c.path"
)
# CROSS JOIN: SQLite keeps to this order; by itself it reads every reference there is, in this one's order.
_REFERENCES = sql.statement(
    "WITH RECURSIVE c(path) AS (SELECT p.path FROM cached_path p WHERE p.path IN [roots]"
    " UNION SELECT r.reference FROM c JOIN cached_path_reference r ON r.path = c.path)"
    " SELECT r.path, r.reference FROM c CROSS JOIN cached_path_reference r WHERE r.path = c.path"
    " ORDER BY r.path, r.reference"
)


@dataclass(frozen=True, slots=True)
class HeldPath:
    """A path in the server's store; `nar_hash` and `nar_size` (bytes) of the uncompressed NAR."""

    path: str
    nar_hash: str
    nar_size: int


@dataclass(slots=True)
class Closures:
    """Paths and their references, loaded once for many jobs; equal closures are one object."""

    held: dict[str, HeldPath]
    references: dict[str, list[str]]
    _required: dict[frozenset[str], tuple[RequiredPath, ...]] = field(default_factory=dict)
    _interned: dict[str, RequiredPath] = field(default_factory=dict)

    def of(self, roots: Iterable[str]) -> list[str]:
        """Every path that `roots` need at run time, themselves included, sorted."""
        seen = set(roots)
        walk = list(seen)
        while walk:
            for reference in self.references.get(walk.pop(), ()):
                if reference not in seen:
                    seen.add(reference)
                    walk.append(reference)
        return sorted(seen)

    def required(self, roots: frozenset[str]) -> tuple[RequiredPath, ...]:
        """The closure as an offer names it. A path that the server lost has no size and is left out."""
        known = self._required.get(roots)
        if known is None:
            known = tuple(self._intern(path) for path in self.of(roots) if path in self.held)
            self._required[roots] = known
        return known

    def _intern(self, path: str) -> RequiredPath:
        required = self._interned.get(path)
        if required is None:
            required = RequiredPath(path=path, nar_size=self.held[path].nar_size)
            self._interned[path] = required
        return required


def load_closures(connection: sa.Connection, roots: Iterable[str]) -> Closures:
    """What the server holds of the closures of `roots`, in two statements."""
    wanted = sorted(set(roots))
    if not wanted:
        return Closures({}, {})
    parameters = {"roots": sql.array(connection, wanted)}
    held = {row[0]: HeldPath(row[0], row[1], int(row[2])) for row in sql.run(connection, _PATHS, parameters)}
    references: dict[str, list[str]] = {}
    for path, reference in sql.run(connection, _REFERENCES, parameters):
        references.setdefault(path, []).append(reference)
    return Closures(held, references)
