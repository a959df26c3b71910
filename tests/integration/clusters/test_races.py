"""Transactions of clusters that meet: each has one outcome, on both databases."""

import sqlalchemy as sa
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages.worker import JobFailed
from gradient_server.db.queries import claims
from gradient_server.db.queries.clusters import (
    claim_cluster,
    close_cluster_attempt,
    start_cluster_attempt,
)
from gradient_server.domain.status import AttemptOutcome
from gradient_server.graph.prepares import fail_prepare
from gradient_server.graph.reports import apply_report
from gradient_server.graph.settle import abort_cluster

from tests.integration.clusters.group import INSTANCE, ClusterPool, cluster, members, race


async def pair(pool: ClusterPool, **fields: object) -> str:
    return await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b", **fields))  # type: ignore[arg-type]  # fields of a cluster


async def test_of_claims_that_meet_at_a_barrier_one_wins(pool: ClusterPool) -> None:
    await pair(pool)
    contenders = [await pool.claim_of() for _ in range(4)]
    now = pool.clock.now()
    won = await race(pool, *(lambda c, claim=claim: claim_cluster(c, claim, now=now) for claim in contenders))
    assert sorted(map(bool, won)) == [False, False, False, True]
    assert await pool.attempts() == [(None, False)]
    assert await pool.open_rows() == 2
    winner = contenders[won.index(True)]
    owners = await pool.run(
        lambda c: c.exec_driver_sql("SELECT DISTINCT cluster_attempt FROM dispatched_job").scalars().all()
    )
    assert set(owners) - {None} == {winner.attempt_id}


async def test_a_cluster_and_a_single_claim_never_share_a_member(pool: ClusterPool) -> None:
    await pair(pool)
    claim = await pool.claim_of()
    alone = claims.Claim(
        assignment_id="alone",
        job_key=claim.members[1].job_key,
        worker_id=await pool.worker("single"),
        instance_id=INSTANCE,
    )
    now = pool.clock.now()
    won = await race(
        pool,
        lambda c: claim_cluster(c, claim, now=now),
        lambda c: claims.claim_assignment(c, alone, now=now),
    )
    assert won == [True, False]


async def test_a_prepare_timeout_that_races_the_last_acceptance_has_one_outcome(pool: ClusterPool) -> None:
    await pair(pool)
    for _ in range(5):
        group = await pool.hold_group()
        now = pool.clock.now()
        started, (failed, _) = await race(
            pool,
            lambda c: start_cluster_attempt(c, group.attempt, INSTANCE, now=now),  # noqa: B023 - it runs now
            lambda c: fail_prepare(c, group.attempt, "timeout", now=now),  # noqa: B023 - it runs now
        )  # type: ignore[misc]  # what the contenders return
        assert started != failed
        assert await pool.cluster_status() == ("Running" if started else "Queued")
        assert await pool.open_rows() == (2 if started else 0)
        if started:
            assert not (await pool.fail_prepare(group))[0]
            await pool.run(
                lambda c: close_cluster_attempt(c, group.attempt, AttemptOutcome.FAILED, now=now)  # noqa: B023 - it runs now
            )
            await pool.run(lambda c: c.exec_driver_sql("UPDATE cluster_job SET status = 'Queued'"))


async def test_a_hold_that_expires_while_the_start_is_stored_has_one_outcome(pool: ClusterPool) -> None:
    await pair(pool)
    for _ in range(5):
        group = await pool.hold_group()
        assignment, worker = await pool.assignment(group, "b")
        message = JobFailed(
            assignment_id=assignment,
            seq=1,
            kind=FailureKind.ABORTED,
            error="cluster start timed out",
            missing_paths=[],
            spans=[],
            spans_dropped=0,
        )
        worker_id, now = await pool.worker(worker), pool.clock.now()

        def report(c: sa.Connection) -> object:
            return apply_report(
                c,
                worker_id=worker_id,  # noqa: B023 - it runs now
                instance_id=INSTANCE,
                message=message,  # noqa: B023 - it runs now
                now=now,  # noqa: B023 - it runs now
                ids=pool.ids,
                settings=pool.settings,
            )

        started, _ = await race(
            pool,
            lambda c: start_cluster_attempt(c, group.attempt, INSTANCE, now=now),  # noqa: B023 - it runs now
            report,
        )
        # The report is held either way: a start that was faster is decided by it, as by any failure.
        if started:
            assert await pool.verdict(group) == "Retry"
            await pool.run(lambda c: c.exec_driver_sql("UPDATE cluster_job SET attempts = 0"))
        else:
            assert (await pool.fail_prepare(group))[0]
        assert await pool.statuses() == {"a": "Queued", "b": "Queued"}
        assert await pool.open_rows() == 0


async def test_an_abort_that_races_a_claim_never_leaves_a_hold(pool: ClusterPool) -> None:
    for _ in range(5):
        await pair(pool)
        claim, wanted, now = await pool.claim_of(), await pool.cluster_id(), pool.clock.now()
        await race(
            pool,
            lambda c: claim_cluster(c, claim, now=now),  # noqa: B023 - it runs now
            lambda c: abort_cluster(c, wanted, now=now, ids=pool.ids),  # noqa: B023 - it runs now
        )
        assert await pool.cluster_status(wanted) == "Aborted"
        assert await pool.open_rows() == 0
