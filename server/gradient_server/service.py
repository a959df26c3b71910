"""What the service manager is told of this server (docs/systemd.md)."""

from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
from gradient_protocol.counting import counted
from gradient_protocol.notify import Notifier
from gradient_protocol.notify_loop import keep_informed

if TYPE_CHECKING:
    import trio

    from gradient_server.net.services import Services

__all__ = ["announce_stop", "announce_work", "status_line", "tell_ready"]

log = structlog.get_logger(__name__)

_STOPPING: Final = "stopping: running jobs go on at the workers"


def status_line(services: "Services") -> str:
    """One line with counts, for `systemctl status`."""
    if services.draining.is_set():
        return _STOPPING
    scheduler = services.scheduler
    running = len(scheduler.pool.assignments)
    waiting = sum(len(table) for table in scheduler.tracker.tables.values())
    workers = counted(len(services.sessions), "worker")
    text = f"{workers} connected, {counted(running, 'job')} running, {counted(waiting, 'job')} waiting"
    held_back = scheduler.tracker.held_back_count
    return f"{text}, {held_back} held back after a failure" if held_back else text


async def tell_ready(notifier: Notifier, services: "Services", loops: "trio.Nursery") -> None:
    """READY, and from now on the status and the watchdog's pings, from the event loop itself."""
    await loops.start(keep_informed, notifier, partial(status_line, services), _unheard)


def announce_work(notifier: Notifier, status: str) -> None:
    """What a start is at."""
    try:
        notifier.status(status)
    except OSError as error:
        _unheard(error)


def announce_stop(notifier: Notifier) -> None:
    """STOPPING."""
    try:
        notifier.stopping(_STOPPING)
    except OSError as error:
        _unheard(error)


def _unheard(error: OSError) -> None:
    log.warning("the service manager does not hear", reason=error.strerror or str(error))
