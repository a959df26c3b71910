"""Workers that come back: adopted, dropped, abandoned."""

from collections.abc import Sequence

import pytest
from gradient_protocol.kinds import ResumeState
from gradient_protocol.messages.worker import ResumedJob
from gradient_server.domain.status import AbortReason
from gradient_server.graph.aborts import abort_assignments
from gradient_server.graph.resume import ResumeDecision, resume

from tests.integration.graph.pool import INSTANCE, Pool, derivation


async def come_back(pool: Pool, running: Sequence[ResumedJob], worker: str = "w1") -> ResumeDecision:
    worker_id = await pool.worker(worker)
    decision = await pool.run(
        lambda c: resume(
            c,
            worker_id=worker_id,
            instance_id=INSTANCE,
            running=running,
            now=pool.clock.now(),
            ids=pool.ids,
            settings=pool.settings,
        )
    )
    pool.publish(decision.events)
    return decision


def listed(assignment: str, seq: int = 0, state: ResumeState = ResumeState.RUNNING) -> ResumedJob:
    return ResumedJob(assignment_id=assignment, job_id="job", state=state, seq=seq)


async def running(pool: Pool, *, accept: bool = True) -> str:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a")])
    assignment = await pool.claim(await pool.key("a"), accept=accept)
    assert assignment is not None
    return assignment


@pytest.mark.parametrize("state", list(ResumeState))
async def test_what_is_listed_and_held_goes_on_and_listing_is_acceptance(
    pool: Pool, state: ResumeState
) -> None:
    assignment = await running(pool, accept=False)
    await pool.output(assignment, await pool.job(await pool.key("a")))
    decision = await come_back(pool, [listed(assignment, 0, state)])
    assert [(job.assignment_id, job.seq, job.log_offset) for job in decision.adopted] == [(assignment, 1, 0)]
    assert not decision.dropped
    assert await pool.scalar("SELECT status FROM dispatched_job WHERE id = :id", id=assignment) == "Accepted"


async def test_what_is_unknown_or_anothers_is_dropped(pool: Pool) -> None:
    assignment = await running(pool)
    decision = await come_back(pool, [listed("nobody"), listed(assignment)], worker="w2")
    assert (decision.adopted, decision.dropped) == ([], ["nobody", assignment])
    assert await pool.statuses() == {"a": "Assigned"}


@pytest.mark.parametrize(("accept", "attempts"), [(True, 1), (False, 0)])
async def test_what_is_held_and_not_listed_is_abandoned(pool: Pool, accept: bool, attempts: int) -> None:
    await running(pool, accept=accept)
    decision = await come_back(pool, [])
    assert (decision.adopted, decision.dropped) == ([], [])
    assert await pool.statuses() == {"a": "Queued"}
    assert await pool.scalar("SELECT attempts FROM derivation_build") == attempts
    assert await pool.key("a") in pool.queued


async def test_a_restored_database_drops_what_it_no_longer_knows(pool: Pool) -> None:
    assignment = await running(pool)
    decision = await come_back(pool, [listed(assignment, seq=3)])
    assert (decision.adopted, decision.dropped) == ([], [assignment])
    assert await pool.statuses() == {"a": "Queued"}


async def test_a_stored_abort_is_sent_again(pool: Pool) -> None:
    assignment = await running(pool)
    await pool.run(
        lambda c: abort_assignments(
            c, [assignment], AbortReason.DRAINED, now=pool.clock.now(), ids=pool.ids, text=""
        )
    )
    decision = await come_back(pool, [listed(assignment)])
    assert [(abort.assignment_id, abort.reason) for abort in decision.aborts] == [
        (assignment, AbortReason.DRAINED)
    ]


async def test_a_member_whose_report_is_stored_is_not_abandoned(pool: Pool) -> None:
    assignment = await running(pool)
    await pool.scalar(
        "UPDATE dispatched_job SET held_report = :r WHERE id = :id RETURNING id", id=assignment, r=b"x"
    )
    await come_back(pool, [])
    assert await pool.statuses() == {"a": "Assigned"}
