"""What the service manager is told of this agent (docs/systemd.md)."""

from functools import partial
from typing import Final

import structlog
import trio
from gradient_protocol.address import Address
from gradient_protocol.kinds import JobKind
from gradient_protocol.notify import Notifier
from gradient_protocol.notify_loop import keep_informed

from gradient_worker.agent import Agent

__all__ = ["announce_stop", "status_line", "tell_ready"]

logger = structlog.get_logger(__name__)

_STOPPING: Final = "stopping: builds go on with the runner"


def status_line(agent: Agent, address: Address) -> str:
    """One line with counts, for `systemctl status`."""
    capabilities = agent.facts.capabilities
    builds, evaluations = (agent.slots.taken(kind) for kind in (JobKind.BUILD, JobKind.EVAL))
    jobs = (
        f"{builds} of {capabilities.max_concurrent_builds} builds,"
        f" {evaluations} of {capabilities.max_concurrent_evaluations} evaluations"
    )
    if agent.draining is not None:
        return f"{agent.draining}: {jobs} still run"
    is_connected = agent.shop.link.current is not None
    return f"{'connected' if is_connected else 'not connected'} to {address}, {jobs}"


async def tell_ready(notifier: Notifier, agent: Agent, address: Address, nursery: trio.Nursery) -> None:
    """READY, and from now on the status and the watchdog's pings, from the event loop itself."""
    await nursery.start(keep_informed, notifier, partial(status_line, agent, address), _unheard)


def announce_stop(notifier: Notifier) -> None:
    """STOPPING."""
    try:
        notifier.stopping(_STOPPING)
    except OSError as error:
        _unheard(error)


def _unheard(error: OSError) -> None:
    logger.warning("the service manager does not hear", reason=error.strerror or str(error))
