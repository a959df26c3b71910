"""The workers' side of bench/cluster: protocol-level members in one process that run nothing.

Reads one JSON line from standard input (address, workers with ids and tokens, members a cluster,
clusters at once, seconds), prints one JSON line: clusters that ended and, for each attempt, when the
last of its members heard StartCluster, on the machine's monotonic clock. The first connection takes
the evaluation and streams clusters.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import trio
from gradient_protocol.address import connect, parse_address
from gradient_protocol.codec import Side
from gradient_protocol.connection import Connection
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import FailureKind, JobKind
from gradient_protocol.limits import REQUEST_REPEAT_SECS
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w

from bench.dispatch_workers import Counts, Evaluator, greet, guard, heartbeats

_WARM_UP_SECS = 2.0


@dataclass
class Seen(Counts):
    """What the pool saw of attempts. `ended` clusters, by their first member's final report."""

    heard: dict[str, int] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    ended: int = 0
    measured_clusters: int = 0


class Member:
    """One worker with one slot: holds, starts, and ends as the first member does."""

    def __init__(self, connection: Connection, plan: dict[str, Any], seen: Seen) -> None:
        self.connection = connection
        self.plan = plan
        self.seen = seen
        self.assigned: server.AssignJob | None = None

    async def run(self) -> None:
        """Until the session ends."""
        while True:
            message = await self.connection.receive()
            if isinstance(message, server.ResumeAck):
                self.ask()
            elif isinstance(message, server.AssignJob):
                self.assigned = message
                self.connection.send(w.AssignJobResponse(assignment_id=message.assignment_id, accepted=True))
            elif isinstance(message, server.StartCluster):
                self.start(message)
            elif isinstance(message, server.AbortCluster):
                self.end(FailureKind.ABORTED)

    async def repeat(self) -> None:
        """The level, every 10 s."""
        while True:
            await trio.sleep(REQUEST_REPEAT_SECS)
            if self.assigned is None:
                self.ask()

    def ask(self) -> None:
        """The slot is free."""
        self.connection.send(w.RequestJob(kind=JobKind.BUILD))

    def start(self, message: server.StartCluster) -> None:
        """The last member to hear it ends the measurement; the first member of the cluster fails."""
        heard = self.seen.heard.pop(message.attempt, 0) + 1
        if heard < self.plan["members"]:
            self.seen.heard[message.attempt] = heard
        elif self.seen.measuring:
            self.seen.started[message.attempt] = time.perf_counter()
        assert self.assigned is not None
        assert self.assigned.cluster is not None
        if self.assigned.cluster.index == 0:
            self.end(FailureKind.PERMANENT)
            self.seen.ended += 1
            self.seen.finished += self.plan["members"]
            self.seen.measured_clusters += self.seen.measuring

    def end(self, kind: FailureKind) -> None:
        """The final report, and the slot is free again."""
        if self.assigned is None:
            return
        self.connection.send(
            w.JobFailed(
                assignment_id=self.assigned.assignment_id,
                seq=1,
                kind=kind,
                error="",
                missing_paths=[],
                spans=[],
                spans_dropped=0,
            )
        )
        self.assigned = None
        self.ask()


class Submitter(Evaluator):
    """Streams clusters while fewer than wanted are under way."""

    async def feed(self) -> None:
        """Keeps `at_once` clusters under way; one at a time, the next a moment after the last."""
        while True:
            await trio.sleep(0.002)
            under_way = (self.counts.submitted - self.counts.finished) // self.plan["members"]
            if self.assignment_id is None or self.seq - self.acknowledged >= 4:
                continue
            # A queue ahead of the workers, where the rate is measured.
            wanted = 1 if self.plan["at_once"] == 1 else 2 * self.plan["at_once"]
            if under_way < wanted:
                self.submit(min(wanted - under_way, 8))

    def submit(self, count: int) -> None:
        """One numbered batch with whole clusters."""
        clusters, derivations = [], []
        for _ in range(count):
            members = [self._member(self.counts.submitted + i) for i in range(self.plan["members"])]
            self.counts.submitted += len(members)
            derivations += members
            clusters.append(
                shapes.Cluster(
                    name=members[0].name,
                    same_zone=True,
                    retry_budget=0,
                    members=[
                        shapes.ClusterMember(drv_path=one.drv_path, role="m", primary=False)
                        for one in members
                    ],
                )
            )
        self.seq += 1
        update = shapes.EvalResult(derivations=derivations, clusters=clusters, warnings=[], errors=[])
        assert self.assignment_id is not None
        self.connection.send(w.JobUpdate(assignment_id=self.assignment_id, seq=self.seq, update=update))

    def _member(self, number: int) -> shapes.Derivation:
        name = f"noop-{number}"
        return shapes.Derivation(
            drv_path=f"{number:032d}-{name}.drv",
            name=name,
            system="any",
            features=[],
            command=["/bin/true"],
            env={},
            outputs=[shapes.DerivationOutput(name="out", path=f"{number:032d}-{name}")],
            inputs=[],
            sources=[],
            prefer_local=False,
        )


async def main() -> None:
    """All of it."""
    plan = json.loads(sys.stdin.readline())
    ids, seen = IdSource(), Seen()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            for position, who in enumerate(plan["workers"]):
                connection = Connection(await connect(parse_address(plan["address"])), Side.WORKER)
                await nursery.start(connection.run)
                await greet(connection, who, ids, evaluates=position == 0)
                nursery.start_soon(heartbeats, connection)
                if position == 0:
                    submitter = Submitter(connection, plan, seen)
                    nursery.start_soon(guard, submitter.run)
                    nursery.start_soon(submitter.feed)
                else:
                    member = Member(connection, plan, seen)
                    nursery.start_soon(guard, member.run)
                    nursery.start_soon(member.repeat)
            await trio.sleep(_WARM_UP_SECS)
            seen.measuring = True
            begin = time.perf_counter()
            await trio.sleep(plan["secs"])
            seen.measuring = False
            elapsed = time.perf_counter() - begin
            rate = round(seen.measured_clusters / elapsed, 1)
            result = {
                "clusters": seen.measured_clusters,
                "clusters_in_all": seen.ended,
                "clusters_per_sec": rate,
                "started": seen.started,
            }
            print(json.dumps(result), flush=True)
            scope.cancel()


if __name__ == "__main__":
    trio.run(main)
