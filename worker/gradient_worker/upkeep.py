"""Small loops of the agent: the deadlines of holds, the peers file, the store's size."""

from pathlib import Path

import structlog
import trio
from gradient_protocol.messages.worker import ReauthRequest

from gradient_worker.agent import Agent
from gradient_worker.identity import IdentityError, read_peers
from gradient_worker.stores.base import Store, StoreError
from gradient_worker.threads import Threads
from gradient_worker.timing import GARBAGE_INTERVAL_SECS, PEERS_POLL_SECS

__all__ = ["collect_garbage", "expire_holds", "watch_peers"]

logger = structlog.get_logger(__name__)


async def expire_holds(agent: Agent) -> None:
    """Release held jobs at their deadline, whether connected or not."""
    while True:
        deadline = agent.holds.next_deadline()
        with trio.CancelScope(deadline=float("inf") if deadline is None else deadline):
            await agent.holds_changed.wait()
        for release in agent.holds.expire(trio.current_time()):
            logger.warning("a hold expired", assignment_id=release.assignment_id)
            agent.carry_out(release)


async def watch_peers(agent: Agent, file: Path) -> None:
    """Read the peers file again when it changes, and ask the server to look at the new tokens."""
    seen = _mark(file)
    while True:
        await trio.sleep(PEERS_POLL_SECS)
        mark = _mark(file)
        if mark == seen:
            continue
        seen = mark
        try:
            agent.peers = read_peers(file)
        except IdentityError as error:
            logger.error("the peers file is not taken", error=str(error))
            continue
        logger.info("the peers file changed", peers=sorted(agent.peers.tokens))
        agent.shop.link.post(ReauthRequest())
        agent.peers_changed.set()


def _mark(file: Path) -> tuple[int, ...] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode


async def collect_garbage(store: Store, threads: Threads, max_bytes: int) -> None:
    """Keep the store under `max_bytes`; 0: never collect. What running jobs need is pinned."""
    while max_bytes:
        try:
            report = await threads.run(lambda: store.collect_garbage(max_bytes))
        except (StoreError, OSError) as error:
            logger.error("garbage was not collected", error=str(error))
        else:
            if report.removed:
                logger.info(
                    "garbage collected",
                    paths=len(report.removed),
                    freed_bytes=report.freed_bytes,
                    held_bytes=report.held_bytes,
                )
        await trio.sleep(GARBAGE_INTERVAL_SECS)
