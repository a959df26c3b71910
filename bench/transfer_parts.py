"""The processes of `bench.transfer`: the server, the worker that moves NARs, and one that asks for jobs."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio
from gradient_protocol.address import TcpAddress, connect
from gradient_protocol.kinds import JobKind
from gradient_protocol.limits import HEARTBEAT_SECS
from gradient_protocol.messages import server as s
from gradient_protocol.messages import worker as w
from gradient_server import logging
from gradient_server.db.migrate import migrate
from gradient_server.db.queries.registry import Registration
from gradient_server.db.runner import Database
from gradient_server.wiring import tune_interpreter
from gradient_worker.transfer import Downloaded, Transfers, Uploaded

from tests.fakes.pool import running_pool
from tests.fakes.transfers import DirectoryStore, Mover, source_path
from tests.fakes.worker import FakeWorker, connected_worker

EVALUATIONS = 6000
"""More than the probe can use up."""
PROBE_EVERY_SECS = 0.02


def say(**answer: object) -> None:
    """One line to the parent."""
    print(json.dumps(answer), flush=True)


async def hear() -> dict[str, Any]:
    """One line from the parent."""
    line = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
    if not line:
        raise SystemExit
    found: dict[str, Any] = json.loads(line)
    return found


async def serve(base_dir: Path) -> None:
    """A server on SQLite, two workers registered, jobs for the probe."""
    base_dir.mkdir(parents=True)
    url = f"sqlite:///{base_dir}/bench.db"
    await trio.to_thread.run_sync(migrate, url)
    database = await Database.open(url)
    try:
        async with running_pool(database, base_dir) as pool:
            known = [await pool.register(name) for name in ("mover", "probe")]
            for _ in range(EVALUATIONS):
                await pool.submit()
            say(
                port=pool.address.port,
                workers=[{"id": one.worker_id, "peer": one.peer, "token": one.token} for one in known],
            )
            await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await database.aclose()


async def beat(session: FakeWorker) -> None:
    """Heartbeats, without which the server takes the worker for dead."""
    n = 0
    while True:
        n += 1
        session.send(w.WorkerMetrics(n=n, lateness_secs=0.0))
        await session.expect(s.HeartbeatAck, within_secs=60)
        await trio.sleep(HEARTBEAT_SECS)


async def move(base_dir: Path, known: dict[str, Any]) -> None:
    """Registers, uploads and downloads what it is told to."""
    one = known["workers"][0]
    mover = Mover.open(base_dir / "made", Registration(one["id"], one["peer"], one["token"], renewed=False))
    fetched = DirectoryStore.open(base_dir / "fetched")
    fetching = Transfers(link=mover.link, store=fetched, threads=mover.threads, ids=mover.ids)
    address = TcpAddress("127.0.0.1", known["port"])
    async with mover.session(await connect(address)) as session, trio.open_nursery() as beating:
        beating.start_soon(beat, session)
        assignment_id = (await mover.take_job(session)).assignment_id
        say(ready=True)

        async def upload(number: int) -> int:
            info = mover.store.info(source_path(number))
            assert info is not None
            outcome = await mover.transfers.upload(assignment_id, info, mover.spans)
            assert isinstance(outcome, Uploaded), outcome
            return info.nar_size

        async def download(number: int) -> int:
            outcome = await fetching.download(assignment_id, source_path(number), None, mover.spans)
            assert isinstance(outcome, Downloaded), outcome
            return outcome.info.nar_size

        def register(trees: list[str], first: int) -> int:
            return sum(mover.make(Path(tree), first + n).nar_size for n, tree in enumerate(trees))

        while True:
            task = await hear()
            started, nar_bytes = time.perf_counter(), 0
            if task["kind"] == "register":
                nar_bytes = await mover.threads.run(lambda task=task: register(task["trees"], task["first"]))  # type: ignore[misc]  # bound in the loop
            else:
                sizes: list[int] = []
                one_of = upload if task["kind"] == "upload" else download

                async def run(
                    number: int,
                    one_of: Callable[[int], Any] = one_of,
                    sizes: list[int] = sizes,
                ) -> None:
                    sizes.append(await one_of(number))

                async with trio.open_nursery() as nursery:
                    for number in range(task["first"], task["first"] + task["count"]):
                        nursery.start_soon(run, number)
                nar_bytes = sum(sizes)
            say(nar_bytes=nar_bytes, secs=round(time.perf_counter() - started, 3))


async def probe(known: dict[str, Any]) -> None:
    """From one line to the next, asks for jobs; then says what RequestJob waited for its AssignJob."""
    one = known["workers"][1]
    address = TcpAddress("127.0.0.1", known["port"])
    async with (
        connected_worker(
            await connect(address), worker_id=one["id"], tokens={one["peer"]: one["token"]}
        ) as worker,
        trio.open_nursery() as beating,
    ):
        beating.start_soon(beat, worker)
        while True:
            await hear()
            waits: list[float] = []
            async with trio.open_nursery() as nursery:

                async def ask(waits: list[float] = waits) -> None:
                    while True:
                        started = time.perf_counter()
                        job = await worker.accept(JobKind.EVAL, within_secs=60)
                        waits.append(time.perf_counter() - started)
                        worker.complete(job.assignment_id, 1)
                        await worker.expect(s.ReportAck, within_secs=60)
                        await trio.sleep(PROBE_EVERY_SECS)

                nursery.start_soon(ask)
                await hear()
                nursery.cancel_scope.cancel()
            waits.sort()
            say(
                requests=len(waits),
                request_p50_ms=round(waits[len(waits) // 2] * 1000, 1),
                request_p99_ms=round(waits[int(len(waits) * 0.99)] * 1000, 1),
            )


def main() -> None:
    """`server <directory>`, `worker <directory> <facts>` or `probe <facts>`."""
    logging.configure(level="error")
    tune_interpreter()
    part, *arguments = sys.argv[1:]
    if part == "server":
        trio.run(serve, Path(arguments[0]))
    elif part == "worker":
        trio.run(move, Path(arguments[0]), json.loads(arguments[1]))
    else:
        trio.run(probe, json.loads(arguments[0]))


if __name__ == "__main__":
    main()
