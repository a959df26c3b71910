"""A server that dies before any one statement of a cluster's transactions, and its successor.

Each kill point is tried with a cluster of its own, on both databases: the process dies there, an instance
takes over what is stored (itself, after a restart), and goes on from that alone until the cluster is
Completed. What is killed between two transactions is the kill before the first statement of the second.
Verdicts have many statements: every sixth is tried, and test_verdicts.py shows of each that nothing is left.
"""

from collections.abc import Awaitable, Callable

import pytest
import sqlalchemy as sa
from gradient_protocol.kinds import FailureKind
from gradient_server.db.queries import claims, instances
from gradient_server.db.queries.clusters import claim_cluster, start_cluster_attempt
from gradient_server.graph.prepares import fail_prepare
from gradient_server.graph.settle import settle_verdict

from tests.fixtures.kill import KilledError, killed_after
from tests.integration.clusters.group import INSTANCE, ClusterPool, Group, cluster, members

Transaction = Callable[[sa.Connection], object]
Prepare = Callable[[ClusterPool], Awaitable[Transaction]]


async def claim(pool: ClusterPool) -> Transaction:
    wanted = await pool.claim_of()
    return lambda c: claim_cluster(c, wanted, now=pool.clock.now())


async def start(pool: ClusterPool) -> Transaction:
    wanted = await pool.claim_of()
    now = pool.clock.now()
    assert await pool.run(lambda c: claim_cluster(c, wanted, now=now))

    def accept_and_start(connection: sa.Connection) -> bool:
        for member in wanted.members:
            claims.accept_assignment(connection, member.assignment_id, member.worker_id, now=now)
        return start_cluster_attempt(connection, wanted.attempt_id, INSTANCE, now=now)

    return accept_and_start


async def close_as_failed_prepare(pool: ClusterPool) -> Transaction:
    group = await pool.hold_group()
    return lambda c: fail_prepare(c, group.attempt, "late", now=pool.clock.now(), instance_id=INSTANCE)


def settles(pool: ClusterPool, group: Group) -> Transaction:
    return lambda c: settle_verdict(
        c, group.attempt, instance_id=INSTANCE, now=pool.clock.now(), ids=pool.ids, settings=pool.settings
    )


async def close_as_completed(pool: ClusterPool) -> Transaction:
    group = await pool.start_group()
    for name in await names(pool):
        await pool.succeeds(group, name)
    return settles(pool, group)


async def close_to_be_repeated(pool: ClusterPool) -> Transaction:
    group = await pool.start_group()
    first, *_ = await names(pool)
    await pool.fails(group, first, FailureKind.TRANSIENT)
    return settles(pool, group)


async def names(pool: ClusterPool) -> list[str]:
    """The members of the newest cluster."""
    query = (
        "SELECT d.name FROM cluster_member m JOIN derivation_build b ON b.id = m.derivation_build"
        " JOIN derivation d ON d.id = b.derivation WHERE m.cluster_job = :id ORDER BY m.position"
    )
    wanted = {"id": await pool.cluster_id()}
    found = await pool.run(lambda c: c.execute(sa.text(query), wanted).scalars().all())
    return list(found)


async def succeed(pool: ClusterPool) -> None:
    """What a successor does, from the database alone."""
    now = pool.clock.now()
    taken = await pool.run(lambda c: instances.take_over(c, INSTANCE, INSTANCE, silent_since=now, now=now))
    assert taken is not None
    [info] = await pool.infos([await pool.cluster_id()])
    attempt = info.open_attempt
    if info.status == "Completed":
        return
    if attempt is None:
        group = await pool.start_group()
    else:
        assert attempt.started_at is not None, "what had not started is closed by the take-over"
        group = Group(attempt.id, info.id, {one.job_key: one.assignment_id for one in attempt.members})
        if any(one.report_stored for one in attempt.members):
            verdict = await pool.verdict(group)
            if verdict != "Retry":
                assert verdict == "Complete"
                return
            group = await pool.start_group()
    for name in await names(pool):
        await pool.succeeds(group, name)
    assert await pool.verdict(group) == "Complete"


@pytest.mark.parametrize(
    ("prepare", "stride"),
    [
        (claim, 1),
        (start, 1),
        (close_as_failed_prepare, 2),
        (close_as_completed, 6),
        (close_to_be_repeated, 6),
    ],
)
async def test_a_server_that_is_killed_anywhere_is_succeeded_and_the_cluster_completes(
    pool: ClusterPool, prepare: Prepare, stride: int
) -> None:
    for statements in range(0, 200, stride):
        pair = (f"a{statements}", f"b{statements}")
        await pool.with_cluster(*members(*pair), cluster=cluster(*pair))
        transaction = await prepare(pool)
        killed = True
        try:
            await pool.run(lambda c: killed_after(c, transaction, statements))  # noqa: B023 - it runs now
        except KilledError:
            pass
        else:
            killed = False
        await succeed(pool)
        assert await pool.cluster_status() == "Completed"
        assert await pool.open_rows() == 0
        if not killed:
            assert statements > 3, "so few statements are no transaction of a cluster"
            return
    raise AssertionError("it never ended")
