"""Members of a closed try that still run: whoever waits for them repeats the cluster. On both databases."""

from dataclasses import replace

import pytest
from gradient_protocol.kinds import FailureKind
from gradient_server.cluster.recovery import stops_at
from gradient_server.cluster.settings import SURVIVORS_SECS
from gradient_server.db.queries import instances
from gradient_server.db.queries.clusters import ClusterClaim, claim_cluster, note_survivors_ended

from tests.integration.clusters.group import INSTANCE, ClusterPool, Group, cluster, members

OTHER = "other"


async def failed_group(pool: ClusterPool) -> Group:
    """`a` failed, `b` runs on, and the cluster is to be tried again."""
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    group = await pool.start_group()
    await pool.fails(group, "a", FailureKind.TRANSIENT)
    assert await pool.verdict(group) == "Retry"
    return group


async def claim_by(pool: ClusterPool, instance: str) -> bool:
    claim = await pool.claim_of()
    claims = [replace(member, instance_id=instance) for member in claim.members]
    theirs = ClusterClaim(
        attempt_id=claim.attempt_id, cluster_id=claim.cluster_id, instance_id=instance, members=claims
    )
    return await pool.run(lambda c: claim_cluster(c, theirs, now=pool.clock.now()))


async def test_who_survives_is_stored_with_the_verdict(pool: ClusterPool) -> None:
    group = await failed_group(pool)
    [info] = await pool.infos()
    found = info.stopping_attempt
    assert found is not None
    assert (found.id, found.instance_id) == (group.attempt, INSTANCE)
    assert found.until == pool.clock.now() + SURVIVORS_SECS
    names = {(await pool.assignment(group, name))[0]: name for name in "ab"}
    reported = {names[one.assignment_id]: one.report_stored for one in found.members}
    assert reported == {"a": True, "b": False}
    assert stops_at(info, found.until - 1) == INSTANCE
    assert stops_at(info, found.until) is None
    await pool.run(lambda c: note_survivors_ended(c, group.attempt))
    assert (await pool.infos())[0].stopping_attempt is None


async def test_where_all_had_reported_nobody_is_waited_for(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    group = await pool.start_group()
    await pool.succeeds(group, "b")
    await pool.fails(group, "a", FailureKind.TRANSIENT)
    assert await pool.verdict(group) == "Retry"
    assert (await pool.infos())[0].stopping_attempt is None


@pytest.mark.parametrize("ended", ["told", "after 300 s"])
async def test_another_instance_repeats_the_cluster_only_once_they_have_ended(
    pool: ClusterPool, ended: str
) -> None:
    group = await failed_group(pool)
    assert not await claim_by(pool, OTHER)
    if ended == "told":
        await pool.run(lambda c: note_survivors_ended(c, group.attempt))
    else:
        pool.clock.advance(SURVIVORS_SECS)
    assert await claim_by(pool, OTHER)


async def test_the_instance_that_waits_for_them_repeats_it_when_it_knows(pool: ClusterPool) -> None:
    await failed_group(pool)
    assert await claim_by(pool, INSTANCE)


async def test_a_successor_waits_for_the_survivors_of_the_dead(pool: ClusterPool) -> None:
    await failed_group(pool)
    now = pool.clock.now()
    await pool.run(
        lambda c: [
            instances.register_instance(c, name, advertise_url=None, now=now) for name in (INSTANCE, OTHER)
        ]
    )
    await pool.run(lambda c: instances.stop_instance(c, INSTANCE, now=now))
    assert await pool.run(lambda c: instances.take_over(c, INSTANCE, OTHER, silent_since=0, now=now))
    [info] = await pool.infos()
    assert stops_at(info, now) == OTHER
    assert not await claim_by(pool, "third")
