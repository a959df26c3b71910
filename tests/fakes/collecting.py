"""As much of a server's services as the passes of retention use."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

import sqlalchemy as sa
import trio
from gradient_server.clock import Clock
from gradient_server.db.runner import Database
from gradient_server.domain.events import Bus, Event
from gradient_server.domain.sweeps import SweepFigures
from gradient_server.net.services import Services
from gradient_server.storage.logs import LogStore
from gradient_server.storage.nar_store import LocalNarStore

__all__ = ["collecting"]

T = TypeVar("T")


def collecting(
    database: Database,
    clock: Clock,
    base_dir: Path,
    *,
    bus: Bus | None = None,
    nar_store: LocalNarStore | None = None,
    retention_days: float = 90.0,
) -> Services:
    """The real parts; nothing runs."""
    bus = bus or Bus()

    async def transact(fn: Callable[[sa.Connection], tuple[T, Sequence[Event]]]) -> T:
        value, events = await database.run(fn)
        bus.publish(events)
        return value

    services = SimpleNamespace(
        bus=bus,
        clock=clock,
        database=database,
        nar_store=nar_store or LocalNarStore(base_dir),
        logs=LogStore(base_dir),
        log_threads=trio.CapacityLimiter(2),
        settings=SimpleNamespace(retention_days=retention_days),
        sweep_figures=SweepFigures(),
        transact=transact,
    )
    return cast("Services", services)
