"""A server started on the database of a farm at work: what waits is assigned, what runs goes on.

`bench.start` measures the same on 100,000 builds.
"""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from gradient_protocol.address import connect, parse_address
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind, ResumeState
from gradient_protocol.messages import server as s
from gradient_protocol.messages import worker as w
from gradient_server.app import run_server
from gradient_server.config import load
from gradient_server.db.engine import make_write_engine, parse_url
from gradient_server.db.migrate import migrate
from gradient_server.first_start import replace_instance_id
from gradient_server.net.services import Services

from tests.fakes.worker import connected_worker
from tests.fixtures.farm import Farm, FarmSize, fill_farm

SIZE = FarmSize(2000, per_evaluation=500, open_evaluations=2, queued_evaluations=3, workers=5)
INSTANCE = "0192d5a8-0000-7000-8000-000000000001"


@pytest.fixture
def farm(tmp_path: Path) -> Farm:
    url = f"sqlite:///{tmp_path}/gradient.db"
    migrate(url)
    replace_instance_id(tmp_path, INSTANCE)
    engine = make_write_engine(parse_url(url))
    with engine.begin() as connection:
        made = fill_farm(connection, SIZE, now=time.time(), instance=INSTANCE, ids=IdSource())
    engine.dispose()
    return made


@pytest.fixture
async def services(farm: Farm, tmp_path: Path) -> AsyncIterator[Services]:
    flags = {"base_dir": str(tmp_path), "port": "0", "proto_listen": f"unix://{tmp_path}/socket"}
    config = load(file=None, environment={}, flags=flags).config
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        yield await nursery.start(
            lambda task_status: run_server(config, stop, announce=lambda _: None, task_status=task_status)
        )
        stop.set()


async def test_what_waits_is_assigned_and_what_runs_goes_on(
    farm: Farm, services: Services, tmp_path: Path
) -> None:
    tracker = services.scheduler.tracker
    assert {kind: len(table) for kind, table in tracker.tables.items()} == {
        JobKind.BUILD: farm.queued,
        JobKind.EVAL: SIZE.queued_evaluations,
    }
    assert set(services.graces.awaited) == set(farm.running)
    registration = next(one for one in farm.workers if one.worker_id in farm.running)
    mine = farm.running[registration.worker_id]
    listed = [
        w.ResumedJob(
            assignment_id=assignment,
            job_id=assignment.replace("assignment-", "build:build-"),
            state=ResumeState.RUNNING,
            seq=0,
        )
        for assignment in mine
    ]
    async with connected_worker(
        await connect(parse_address(f"unix://{tmp_path}/socket")),
        worker_id=registration.worker_id,
        tokens={registration.peer: registration.token},
        running=listed,
        builds=len(mine) + 1,
        expect_resume=False,
    ) as worker:
        answer = await worker.expect(s.ResumeAck, within_secs=30)
        assert sorted(one.assignment_id for one in answer.adopted) == sorted(mine)
        build = await worker.accept(JobKind.BUILD, within_secs=30)
        evaluation = await worker.accept(JobKind.EVAL, within_secs=30)
    assert build.job_id not in tracker
    assert evaluation.job_id not in tracker
    assert set(services.graces.awaited) >= set(farm.running) - {registration.worker_id}
