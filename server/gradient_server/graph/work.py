"""One transaction's work on the graph: where it writes, when, and what it will have changed."""

from dataclasses import dataclass, field

import sqlalchemy as sa
from gradient_protocol.ids import IdSource

from gradient_server.domain.events import Event
from gradient_server.graph.settings import GraphSettings

__all__ = ["Work"]


@dataclass(slots=True)
class Work:
    """Passed down through whatever one transaction does; `events` are for after its commit."""

    connection: sa.Connection
    now: float
    ids: IdSource
    settings: GraphSettings = field(default_factory=GraphSettings)
    events: list[Event] = field(default_factory=list)
    # What this transaction has still to end, by id, with the reason (aftermath.py): open attempts whose
    # members were aborted, and evaluations that were waiting members of a cluster that ended.
    attempts_to_abort: dict[str, str] = field(default_factory=dict)
    evaluations_to_abort: dict[str, str] = field(default_factory=dict)
    # An evaluation no longer waits for an import: builds may have to be lowered again.
    imports_over: bool = False
