"""What an agent that starts finds: its journal, and its runner's builds (protocol.md, "Lost connections")."""

import structlog

from gradient_worker.agent import Agent
from gradient_worker.cluster_socket import remove_stale_sockets
from gradient_worker.runner.client import RunnerClient
from gradient_worker.runner.values import RunnerGone, RunnerRefused

__all__ = ["recover"]

logger = structlog.get_logger(__name__)


async def recover(agent: Agent) -> None:
    """Take up what an earlier agent left, and kill what no journal names. Before the first session."""
    runner, builds = await _builds(agent)
    known = set()
    for found in agent.shop.journal.recover():
        assignment_id = found.assign.assignment_id
        known.add(assignment_id)
        logger.info("taken up", assignment_id=assignment_id, at_runner=assignment_id in builds)
        agent.recover(found, at_runner=assignment_id in builds)
    remove_stale_sockets(agent.shop.base_dir, builds & known)
    for assignment_id in builds - known:
        logger.warning("a build that no journal names is ended", assignment_id=assignment_id)
        await _end(runner, assignment_id)


async def _builds(agent: Agent) -> tuple[RunnerClient, set[str]]:
    while True:
        runner = await agent.shop.runner.client()
        try:
            return runner, {build.assignment_id for build in await runner.list()}
        except RunnerGone:
            logger.warning("the build runner died while the agent started")


async def _end(runner: RunnerClient, assignment_id: str) -> None:
    try:
        await runner.kill(assignment_id)
        await runner.wait(assignment_id)
        await runner.forget(assignment_id)
    except (RunnerGone, RunnerRefused) as error:
        logger.warning("a build could not be ended", assignment_id=assignment_id, error=str(error))
