"""The heartbeat of a session: a task of its own, so that its lateness tells of the loop's.

Every 10 s a WorkerMetrics; its HeartbeatAck teaches the server's clock. Three without an answer are a
dead server (protocol.md, "Lanes and flow", "Spans and metrics").
"""

from typing import TYPE_CHECKING

import structlog
import trio
from gradient_protocol.limits import HEARTBEAT_SECS, HEARTBEATS_MISSED
from gradient_protocol.messages.server import HeartbeatAck
from gradient_protocol.messages.worker import WorkerMetrics

from gradient_worker.meters.host import CpuMeter, ram_free_mb

if TYPE_CHECKING:
    from gradient_worker.agent import Agent
    from gradient_worker.session import Session

__all__ = ["Heartbeat"]

logger = structlog.get_logger(__name__)


class Heartbeat:
    """Sends and counts. `answered` is called by the reader."""

    def __init__(self, agent: "Agent", session: "Session") -> None:
        self._agent = agent
        self._session = session
        self._cpu = CpuMeter()
        self._last = 0
        self._sent_at: dict[int, float] = {}

    async def run(self) -> None:
        """Beat until three beats stay unanswered, which ends the session."""
        due = trio.current_time()
        while len(self._sent_at) < HEARTBEATS_MISSED:
            self._beat(lateness_secs=max(0.0, trio.current_time() - due))
            due += HEARTBEAT_SECS
            await trio.sleep_until(due)
        self._session.stop(f"{HEARTBEATS_MISSED} heartbeats were not answered", code=408)

    def answered(self, ack: HeartbeatAck) -> None:
        """The server answered. An answer to nothing is ignored, one answers all before it."""
        sent_at = self._sent_at.get(ack.n)
        if sent_at is None:
            return
        clock = self._agent.shop.clock
        clock.sample(sent_at, clock.steady(), ack.server_time)
        self._sent_at = {n: at for n, at in self._sent_at.items() if n > ack.n}

    def _beat(self, *, lateness_secs: float) -> None:
        self._last += 1
        peaks = self._agent.heartbeat_peaks(live=self._session.live)
        speeds = self._agent.shop.speeds
        total_mb = self._agent.facts.capabilities.ram_total_mb
        # Peaks where the present use is meant: too little is promised while a build has shrunk.
        own_mb = sum((self._agent.shop.meters.peaks_mb() or {}).values())
        message = WorkerMetrics(
            n=self._last,
            lateness_secs=lateness_secs,
            cpu_usage_pct=self._cpu.usage_pct(),
            ram_free_mb=ram_free_mb(total_mb, own_mb),
            disk_speed_mbps=speeds.disk.mib_per_sec,
            upload_speed_mbps=speeds.upload.mbps,
            download_speed_mbps=speeds.download.mbps,
            build_peak_ram_mb=None if peaks is None else dict(peaks),
        )
        self._session.send(message)
        self._sent_at[self._last] = self._agent.shop.clock.steady()
