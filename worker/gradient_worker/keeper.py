"""Keeps a connection to the build runner: to the one that is there, else to a new one."""

import contextlib

import structlog
import trio

from gradient_worker.runner.client import RunnerClient, connect_or_spawn
from gradient_worker.runner.options import RunnerOptions
from gradient_worker.runner.values import RunnerGone

__all__ = ["RunnerKeeper"]

RETRY_SECS = 1.0

logger = structlog.get_logger(__name__)


class RunnerKeeper:
    """One for the agent. Builds outlive the connection and the agent, so nothing here ends them."""

    def __init__(self, options: RunnerOptions) -> None:
        self._options = options
        self._client: RunnerClient | None = None
        self._arrived = trio.Event()
        self._dismissed = False

    async def dismiss(self) -> None:
        """Ends a runner that an agent started and that has nothing left; others are not ours to end."""
        client = await self.client()
        with contextlib.suppress(RunnerGone):
            if (await client.info()).detached and not await client.list():
                self._dismissed = True
                await client.stop_runner()

    async def client(self) -> RunnerClient:
        """The connection there is, or the next one."""
        while self._client is None or self._client.is_gone:
            await self._arrived.wait()
        return self._client

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect, again and again. Started once a connection stands; RunnerGone if none ever does."""
        self._client = await connect_or_spawn(self._options)
        first = True
        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._client.run)
                self._arrived.set()
                if first:
                    task_status.started()
                    first = False
            self._arrived = trio.Event()
            if self._dismissed:
                return
            logger.error("the build runner is gone; its builds are lost and a new one is started")
            self._client = await self._connect_again()

    async def _connect_again(self) -> RunnerClient:
        while True:
            try:
                return await connect_or_spawn(self._options)
            except RunnerGone as error:
                logger.error("no build runner", error=str(error))
                await trio.sleep(RETRY_SECS)
