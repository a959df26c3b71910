"""What every handler may use, wired by `app` alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import sqlalchemy as sa
import trio
from gradient_protocol.ids import IdSource

from gradient_server.clock import Clock
from gradient_server.config import ServerConfig
from gradient_server.db.bridge import Together
from gradient_server.db.runner import Database
from gradient_server.domain.events import Bus, Event
from gradient_server.domain.sweeps import SweepFigures
from gradient_server.net.instances import Gate
from gradient_server.storage.logs import LogStore
from gradient_server.storage.nar_store import LocalNarStore

if TYPE_CHECKING:  # these use Services themselves
    from gradient_server.cluster.runner import ClusterRunner
    from gradient_server.graph.settings import GraphSettings
    from gradient_server.history.refresh import HistoryLoader, WindowsPass
    from gradient_server.net.authority import Authority
    from gradient_server.net.graces import Graces
    from gradient_server.net.sessions import Sessions
    from gradient_server.net.succession import Succession
    from gradient_server.net.sweeps import Sweeps
    from gradient_server.scheduler.scheduler import Scheduler
    from gradient_server.storage.downloads import Downloads
    from gradient_server.storage.retention import Retention
    from gradient_server.storage.uploads import Uploads

__all__ = ["Services"]

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Services:
    """The parts of one server. `draining` is set once the server stops."""

    database: Database
    bus: Bus
    clock: Clock
    ids: IdSource
    settings: ServerConfig
    graph_settings: "GraphSettings"
    instance_id: str
    scheduler: "Scheduler"
    nar_store: LocalNarStore
    logs: LogStore
    sessions: "Sessions"
    draining: trio.Event
    # Disk work on logs has few threads of its own, so that it never starves what else waits for one.
    log_threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(4))
    sweep_figures: SweepFigures = field(default_factory=SweepFigures)
    # Shut while another instance's jobs are taken over.
    taking_over: Gate = field(default_factory=Gate)
    # These use the others, so they are set right after.
    clusters: "ClusterRunner" = field(init=False)
    history: "HistoryLoader" = field(init=False)
    windows: "WindowsPass" = field(init=False)
    authority: "Authority" = field(init=False)
    graces: "Graces" = field(init=False)
    downloads: "Downloads" = field(init=False)
    uploads: "Uploads" = field(init=False)
    retention: "Retention" = field(init=False)
    succession: "Succession" = field(init=False)
    sweeps: "Sweeps" = field(init=False)

    async def transact(
        self, fn: Callable[[sa.Connection], tuple[T, Sequence[Event]]], together: Together | None = None
    ) -> T:
        """One write transaction, its events published right after its commit; `together` as `Database.run`.

        Not cancellable: a commit whose events were lost would leave memory behind the database.
        """
        with trio.CancelScope(shield=True):
            value, events = await self.database.run(fn, together)
            self.bus.publish(events)
        return value
