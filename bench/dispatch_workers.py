"""The workers' side of bench/dispatch: many protocol-level workers in one process, no-op jobs.

Reads one JSON line from standard input (address, workers with ids and tokens, seconds to warm up
and to measure, pending jobs to keep, the output every job "makes"), prints one JSON line.
One more connection than workers, the first, takes the evaluation and streams derivations so that
the wanted number of jobs stays pending.
"""

import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio
from gradient_protocol.address import connect, parse_address
from gradient_protocol.codec import Side
from gradient_protocol.connection import Connection
from gradient_protocol.errors import SessionClosed
from gradient_protocol.handshake import HandshakeOutcome, handshake_as_worker
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind
from gradient_protocol.limits import HEARTBEAT_SECS, PROTO_VERSION, REQUEST_REPEAT_SECS
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w

_BATCH = 250


@dataclass
class Counts:
    """What the whole pool saw; `measuring` limits it to the measured time."""

    measuring: bool = False
    finished: int = 0
    measured: int = 0
    offers: int = 0
    scores: int = 0
    assign_ms: list[float] = field(default_factory=list)
    submitted: int = 0


async def greet(connection: Connection, who: dict[str, str], ids: IdSource, *, evaluates: bool) -> None:
    """Handshake, capabilities, an empty resume."""
    hello = w.InitConnection(
        version=PROTO_VERSION,
        worker_id=who["worker_id"],
        name=who["name"],
        incarnation=ids.new(),
        capabilities=shapes.Capabilities(fetch=evaluates, eval=evaluates, build=not evaluates, zstd=True),
    )
    outcome = await handshake_as_worker(connection, hello, {"*": who["token"]})
    if not isinstance(outcome, HandshakeOutcome):
        raise SystemExit(f"refused: {outcome}")
    connection.send(
        w.WorkerCapabilities(
            architectures=["x86_64-linux"],
            system_features=[],
            max_concurrent_builds=1,
            max_concurrent_evaluations=1,
            cpu_count=16,
            ram_total_mb=65_536,
            build_memory=False,
            cpu_core_score=3000.0,
        )
    )
    connection.send(w.ResumeJobs(running=[]))


async def heartbeats(connection: Connection) -> None:
    """Every 10 s, as every worker."""
    n = 0
    while True:
        connection.send(w.WorkerMetrics(n=n, lateness_secs=0.0, cpu_usage_pct=10.0, ram_free_mb=60_000))
        n += 1
        await trio.sleep(HEARTBEAT_SECS)


class Builder:
    """One worker that builds nothing, as fast as it is told to."""

    def __init__(self, connection: Connection, plan: dict[str, Any], counts: Counts) -> None:
        self.connection = connection
        self.plan = plan
        self.counts = counts
        self.asked_at = 0.0
        self.waits = False

    def ask(self) -> None:
        """The slot is free."""
        self.asked_at = time.perf_counter()
        self.waits = True
        self.connection.send(w.RequestJob(kind=JobKind.BUILD))

    async def run(self) -> None:
        """Until the session ends."""
        handlers = {
            server.ResumeAck: self.resumed,
            server.JobListChunk: self.offered,
            server.JobOffer: self.offered,
            server.AssignJob: self.assigned,
            server.ReportAck: self.acknowledged,
        }
        while True:
            message = await self.connection.receive()
            handler = handlers.get(type(message))
            if handler is not None:
                handler(message)

    async def repeat(self) -> None:
        """The level, every 10 s."""
        while True:
            await trio.sleep(REQUEST_REPEAT_SECS)
            if self.waits:
                self.connection.send(w.RequestJob(kind=JobKind.BUILD))

    def resumed(self, _message: server.ResumeAck) -> None:
        self.connection.send(w.RequestJobList())
        self.ask()

    def offered(self, message: server.JobOffer | server.JobListChunk) -> None:
        if self.counts.measuring:
            self.counts.offers += len(message.candidates)
            self.counts.scores += len(message.candidates)
        scores = [
            w.CandidateScore(job_id=c.job_id, missing_count=0, missing_nar_size=0, outputs_present=False)
            for c in message.candidates
        ]
        self.connection.send(w.CandidateScores(scores=scores, is_final=True))

    def assigned(self, message: server.AssignJob) -> None:
        if self.counts.measuring and self.waits:
            self.counts.assign_ms.append((time.perf_counter() - self.asked_at) * 1000)
        self.waits = False
        job = message.job
        assert isinstance(job, shapes.BuildJob)
        send = self.connection.send
        assignment_id = message.assignment_id
        send(w.AssignJobResponse(assignment_id=assignment_id, accepted=True))
        output = shapes.BuiltOutput(
            name=job.outputs[0].name,
            path=job.outputs[0].path,
            nar_hash=self.plan["nar_hash"],
            nar_size=self.plan["nar_size"],
            references=[],
            contains_store_dir=False,
        )
        update = shapes.BuildOutput(outputs=[output], products=[], substituted=False)
        send(w.JobUpdate(assignment_id=assignment_id, seq=1, update=update))
        send(w.JobCompleted(assignment_id=assignment_id, seq=2, spans=[], spans_dropped=0))
        self.ask()

    def acknowledged(self, message: server.ReportAck) -> None:
        if message.seq == 2:
            self.counts.finished += 1
            if self.counts.measuring:
                self.counts.measured += 1


class Evaluator:
    """Streams derivations while fewer than wanted are pending."""

    def __init__(self, connection: Connection, plan: dict[str, Any], counts: Counts) -> None:
        self.connection = connection
        self.plan = plan
        self.counts = counts
        self.seq = 0
        self.acknowledged = 0
        self.assignment_id: str | None = None

    async def run(self) -> None:
        """Until the session ends."""
        while True:
            message = await self.connection.receive()
            if isinstance(message, server.ResumeAck):
                self.connection.send(w.RequestJob(kind=JobKind.EVAL))
            elif isinstance(message, server.JobOffer | server.JobListChunk):
                scores = [
                    w.CandidateScore(
                        job_id=c.job_id, missing_count=0, missing_nar_size=0, outputs_present=False
                    )
                    for c in message.candidates
                ]
                self.connection.send(w.CandidateScores(scores=scores, is_final=True))
            elif isinstance(message, server.AssignJob):
                self.assignment_id = message.assignment_id
                self.connection.send(w.AssignJobResponse(assignment_id=message.assignment_id, accepted=True))
            elif isinstance(message, server.ReportAck):
                self.acknowledged = message.seq
            elif type(message).__name__ in {"Error", "AbortJob"}:
                raise SystemExit(f"the evaluation failed: {message}")

    async def feed(self) -> None:
        """Keeps the queue filled."""
        while True:
            await trio.sleep(0.02)
            pending = self.counts.submitted - self.counts.finished
            if self.assignment_id is None or self.seq - self.acknowledged >= 4:
                continue
            if pending < self.plan["pending"]:
                self.submit(min(_BATCH, self.plan["pending"] - pending + _BATCH // 2))

    def submit(self, count: int) -> None:
        """One numbered batch of derivations without inputs."""
        derivations = [self.derivation(self.counts.submitted + i) for i in range(count)]
        self.counts.submitted += count
        self.seq += 1
        update = shapes.EvalResult(derivations=derivations, clusters=[], warnings=[], errors=[])
        assert self.assignment_id is not None
        self.connection.send(w.JobUpdate(assignment_id=self.assignment_id, seq=self.seq, update=update))

    def derivation(self, number: int) -> shapes.Derivation:
        """Every job makes the same output, which the server holds already."""
        name = f"noop-{number}"
        return shapes.Derivation(
            drv_path=f"{number:032d}".replace("e", "f") + f"-{name}.drv",
            name=name,
            system="any",
            features=[],
            command=["/bin/true"],
            env={},
            outputs=[shapes.DerivationOutput(name="out", path=self.plan["path"])],
            inputs=[],
            sources=[],
            prefer_local=False,
            pname="noop",
        )


async def main() -> None:
    """All of it."""
    plan = json.loads(sys.stdin.readline())
    ids = IdSource()
    counts = Counts()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            for position, who in enumerate(plan["workers"]):
                connection = Connection(await connect(parse_address(plan["address"])), Side.WORKER)
                await nursery.start(connection.run)
                await greet(connection, who, ids, evaluates=position == 0)
                nursery.start_soon(heartbeats, connection)
                if position == 0:
                    evaluator = Evaluator(connection, plan, counts)
                    nursery.start_soon(guard, evaluator.run)
                    nursery.start_soon(evaluator.feed)
                else:
                    builder = Builder(connection, plan, counts)
                    nursery.start_soon(guard, builder.run)
                    nursery.start_soon(builder.repeat)
            await trio.sleep(plan["warm_up_secs"])
            counts.measuring = True
            begin = time.perf_counter()
            await trio.sleep(plan["measure_secs"])
            counts.measuring = False
            elapsed = time.perf_counter() - begin
            print(json.dumps(result(counts, elapsed)), flush=True)
            scope.cancel()


async def guard(run: Callable[[], Awaitable[None]]) -> None:
    """A session that ends early spoils the measurement: say so."""
    try:
        await run()
    except SessionClosed as closed:
        raise SystemExit(f"a session ended: {closed.reason}") from None


def result(counts: Counts, elapsed: float) -> dict[str, float | int]:
    """The figures."""
    waits = sorted(counts.assign_ms) or [float("nan")]
    return {
        "jobs": counts.measured,
        "secs": round(elapsed, 3),
        "jobs_per_sec": round(counts.measured / elapsed, 1),
        "request_to_assign_p50_ms": round(waits[len(waits) // 2], 2),
        "request_to_assign_p99_ms": round(waits[int(len(waits) * 0.99)], 2),
        "offered_candidates": counts.offers,
        "scores": counts.scores,
        "jobs_in_all": counts.finished,
        "pending_at_end": counts.submitted - counts.finished,
    }


if __name__ == "__main__":
    trio.run(main)
