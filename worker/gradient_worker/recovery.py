"""What an agent that starts finds: its journal, and its runner's builds (protocol.md, "Lost connections")."""

import contextlib
from collections.abc import Sequence

import structlog

from gradient_worker import timing
from gradient_worker.agent import Agent
from gradient_worker.cluster_socket import remove_stale_sockets
from gradient_worker.executor.reporter import FINAL_REPORTS
from gradient_worker.journal_keeper import Recovered
from gradient_worker.runner.client import RunnerClient
from gradient_worker.runner.values import RunnerGone, RunnerRefused

__all__ = ["recover"]

logger = structlog.get_logger(__name__)


async def recover(agent: Agent) -> None:
    """Take up what an earlier agent left, and kill what no journal names. Before the first session."""
    runner, builds = await _builds(agent)
    recovered = agent.shop.journal.recover()
    known = {found.assign.assignment_id for found in recovered}
    suspect = _suspect(agent, recovered)
    for found in recovered:
        assignment_id = found.assign.assignment_id
        at_runner = assignment_id in builds
        died = None if suspect is None or suspect[0] != assignment_id else suspect[1]
        logger.info("taken up", assignment_id=assignment_id, at_runner=at_runner, agents_died=died)
        if died is not None and at_runner:
            await _kill(runner, assignment_id)
        agent.recover(found, at_runner=at_runner, agents_died=died)
    remove_stale_sockets(agent.shop.base_dir, builds & known)
    for assignment_id in builds - known:
        logger.warning("a build that no journal names is ended", assignment_id=assignment_id)
        await _end(runner, assignment_id)


def _suspect(agent: Agent, recovered: Sequence[Recovered]) -> tuple[str, int] | None:
    """The assignment that seems to kill agents, and how many died while they had it.

    Of several, the one that came last: those before it lived with agents until it came. Where it is
    innocent, the next death finds the next.
    """
    suspect = None
    for found in recovered:
        if not any(isinstance(report, FINAL_REPORTS) for _seq, report in found.pending):
            died = agent.shop.journal.taken_up(found.assign.assignment_id)
            if died >= timing.AGENT_DEATHS:
                suspect = found.assign.assignment_id, died
    return suspect


async def _builds(agent: Agent) -> tuple[RunnerClient, set[str]]:
    while True:
        runner = await agent.shop.runner.client()
        try:
            return runner, {build.assignment_id for build in await runner.list()}
        except RunnerGone:
            logger.warning("the build runner died while the agent started")


async def _end(runner: RunnerClient, assignment_id: str) -> None:
    if await _kill(runner, assignment_id):
        with contextlib.suppress(RunnerGone, RunnerRefused):  # the next runner finds it, and the next agent
            await runner.forget(assignment_id)


async def _kill(runner: RunnerClient, assignment_id: str) -> bool:
    """Whether nothing of the build runs any more."""
    try:
        await runner.kill(assignment_id)
        await runner.wait(assignment_id)
    except (RunnerGone, RunnerRefused) as error:
        logger.warning("a build could not be ended", assignment_id=assignment_id, error=str(error))
        return False
    return True
