"""How the agent leaves (operations.md, "Signals of the operating system").

    SIGTERM   hands over: holds released, Draining, out; builds go on with the runner
    SIGUSR1   drains: what runs may end until drainTimeoutSecs, the rest is Canceled
    SIGINT    drains; a second one cancels the rest now

A drained agent is gone once every report is acknowledged, or after 10 s. None of it is needed for the
next agent: the journal and the runner have what it must know.
"""

import signal

import structlog
import trio

from gradient_worker.agent import Agent
from gradient_worker.executor.job import Stop, StopCause
from gradient_worker.timing import ACK_WAIT_AT_EXIT_SECS, HAND_OVER_FLUSH_SECS

__all__ = ["wait_for_leave"]

logger = structlog.get_logger(__name__)


async def wait_for_leave(agent: Agent, drain_timeout_secs: float) -> None:
    """Return once the agent may go."""
    hand_over = False
    draining = False
    hurry = trio.Event()
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def drain_and_go() -> None:
                await drain(agent, drain_timeout_secs, hurry)
                nursery.cancel_scope.cancel()

            async for number in signals:
                logger.info("told to leave", signal=signal.Signals(number).name)
                if number == signal.SIGTERM:
                    hand_over = True
                    nursery.cancel_scope.cancel()
                elif not draining:
                    draining = True
                    nursery.start_soon(drain_and_go)
                elif number == signal.SIGINT:
                    hurry.set()
    if hand_over:
        await _hand_over(agent)


async def drain(agent: Agent, drain_timeout_secs: float, hurry: trio.Event) -> None:
    """No more jobs; wait for what runs, cancel the rest, wait for the acknowledgements."""
    agent.stop_taking_jobs("worker draining")
    with trio.move_on_after(drain_timeout_secs):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when, hurry, nursery.cancel_scope)
            while agent.jobs.unfinished:
                await agent.idle.wait()
            nursery.cancel_scope.cancel()
    agent.stop_all(Stop(StopCause.CANCELED, "the worker is draining"))
    while agent.jobs.unfinished:  # the kill ladder is bounded, and so is this
        await agent.idle.wait()
    with trio.move_on_after(ACK_WAIT_AT_EXIT_SECS):
        while len(agent.jobs):
            await agent.idle.wait()
        await agent.shop.runner.dismiss()


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def _hand_over(agent: Agent) -> None:
    agent.stop_taking_jobs("worker restarting")
    agent.stop_all(Stop(StopCause.HANDED_OVER, "the agent goes"))
    wire = agent.shop.link.current
    if wire is None:
        return
    with trio.move_on_after(HAND_OVER_FLUSH_SECS):
        while wire.connection.pending_control_bytes and not wire.ended.is_set():  # noqa: ASYNC110 - rare
            await trio.sleep(0.02)
