"""Clusters as the graph keeps them until something starts them: stored, joined, made anew."""

from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages.shapes import Cluster, ClusterMember
from gradient_server.graph.aborts import abort_evaluation

from tests.fixtures.graph import store_path
from tests.integration.graph.pool import Pool, derivation


def pair() -> Cluster:
    members = [
        ClusterMember(drv_path=store_path(f"{name}.drv"), role=role, primary=name == "a")
        for name, role in (("a", "server"), ("b", "client"), ("c", "client"))
    ]
    return Cluster(name="pair", same_zone=True, retry_budget=2, members=members)


GRAPH = [derivation("base"), derivation("a", "base"), derivation("b"), derivation("c")]


async def test_a_member_never_starts_alone(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, GRAPH, clusters=[pair()])
    assert await pool.statuses() == {"base": "Queued", "a": "Created", "b": "Queued", "c": "Queued"}
    job = pool.queued[await pool.key("b")]
    assert job.cluster == await pool.scalar("SELECT id FROM cluster_job")
    assert await pool.claim(await pool.key("b")) is None
    rows = await pool.run(
        lambda c: c.exec_driver_sql('SELECT role, "index" FROM cluster_member ORDER BY position').all()
    )
    assert [tuple(row) for row in rows] == [("server", 0), ("client", 0), ("client", 1)]


async def test_a_cluster_that_is_under_way_is_joined(pool: Pool) -> None:
    for _ in range(2):
        await pool.evaluate(await pool.submit(), GRAPH, clusters=[pair()])
    assert await pool.scalar("SELECT COUNT(*) FROM cluster_job") == 1
    assert await pool.scalar("SELECT COUNT(*) FROM cluster_member") == 3


async def test_a_failed_dependency_ends_the_waiting_cluster_and_asking_again_makes_a_new_one(
    pool: Pool,
) -> None:
    first = await pool.submit()
    await pool.evaluate(first, GRAPH, clusters=[pair()])
    failing = await pool.claim(await pool.key("base"))
    assert failing is not None
    await pool.fail(failing, FailureKind.PERMANENT)
    assert await pool.statuses() == {
        "base": "Failed",
        "a": "DependencyFailed",
        "b": "Aborted",
        "c": "Aborted",
    }
    assert await pool.scalar("SELECT status FROM cluster_job") == "Failed"
    assert await pool.evaluation_status(first) == "Failed"
    assert not pool.queued
    second = await pool.submit()
    await pool.evaluate(second, GRAPH, clusters=[pair()])
    assert await pool.scalar("SELECT COUNT(*) FROM cluster_job WHERE status = 'Queued'") == 1
    assert await pool.statuses() == {"base": "Queued", "a": "Created", "b": "Queued", "c": "Queued"}


async def test_an_aborted_evaluation_ends_the_cluster_that_only_it_wanted(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, GRAPH, clusters=[pair()])
    await pool.run(lambda c: abort_evaluation(c, evaluation, now=pool.clock.now(), ids=pool.ids))
    assert await pool.scalar("SELECT status FROM cluster_job") == "Aborted"
    assert set((await pool.statuses()).values()) == {"Aborted"}
