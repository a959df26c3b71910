"""What the API shows of clusters, on both databases."""

import sqlalchemy as sa
from gradient_server.graph.cluster_views import (
    ClusterView,
    cluster_view,
    clusters_of_evaluation,
    find_clusters,
    list_clusters,
    usual_build_secs,
)

from tests.integration.clusters.group import ClusterPool, cluster, members
from tests.integration.graph.pool import derivation


async def view_of(pool: ClusterPool, cluster_id: str) -> ClusterView:
    view = await pool.database.read(lambda c: cluster_view(c, cluster_id))
    assert view is not None
    return view


async def test_a_cluster_with_its_tries_the_oldest_first(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b", primary="b"))
    group = await pool.hold_group()
    assert (await pool.fail_prepare(group, "on-b rejected: full"))[0]
    group = await pool.start_group()
    await pool.fails(group, "a")
    under_way = (await view_of(pool, group.cluster)).attempts[-1]
    assert [(one.role, one.reported, one.outcome) for one in under_way.members] == [
        ("client", True, None),
        ("server", False, None),
    ]
    assert await pool.verdict(group) == "Retry"
    view = await view_of(pool, group.cluster)
    assert (view.summary.status, view.summary.attempts, view.left_off) == ("Queued", 1, 0)
    assert [(one.outcome, one.started_at is None, one.reason) for one in view.attempts] == [
        ("PrepareFailed", True, "on-b rejected: full"),
        ("Failed", False, "client 0: it ended Permanent; retry 1 of 1"),
    ]
    failed, stopped = view.attempts[-1].members
    assert (failed.name, failed.outcome, failed.error) == ("a", "Permanent", "it ended Permanent")
    assert (stopped.name, stopped.outcome) == ("b", "Aborted")
    assert stopped.worker is not None
    assert stopped.worker.startswith("on-build:")
    assert view.summary.reason == "client 0: it ended Permanent; retry 1 of 1"


async def test_a_cluster_is_found_by_id_beginning_name_project_and_evaluation(pool: ClusterPool) -> None:
    first = await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    one = await pool.cluster_id()
    pool.clock.advance(1)
    second = await pool.with_cluster(*members("c"), cluster=cluster("c"))
    two = await pool.cluster_id()

    def read(connection: sa.Connection) -> None:
        newest = list_clusters(connection, None, 10)
        assert [found.id for found in newest] == [two, one]
        assert [found.members for found in newest] == [1, 2]
        assert list_clusters(connection, newest[0].project_id, 1) == newest[:1]
        assert list_clusters(connection, "another", 10) == []
        assert find_clusters(connection, two, None) == newest[:1]
        assert find_clusters(connection, "group", None) == newest[:1], "the newest of that name"
        assert find_clusters(connection, "group", "another") == []
        assert find_clusters(connection, two[:5], None) == []
        assert {found.id for found in find_clusters(connection, two[:6], None)} >= {two}
        assert [found.id for found in clusters_of_evaluation(connection, first)] == [one]
        assert [found.id for found in clusters_of_evaluation(connection, second)] == [two]
        assert cluster_view(connection, "nothing") is None

    await pool.database.read(read)


async def test_a_member_that_cannot_start_says_what_it_waits_for(pool: ClusterPool) -> None:
    batch = [*members("needed", "later"), derivation("a", "needed", "later"), derivation("b")]
    await pool.with_cluster(*batch, cluster=cluster("a", "b"))
    view = await view_of(pool, await pool.cluster_id())
    assert [(one.name, one.status, one.waits_for) for one in view.members] == [
        ("a", "Created", ("later", "needed")),
        ("b", "Queued", ()),
    ]


async def test_how_long_a_build_usually_takes_is_the_mean_of_its_packages_last_runs(
    pool: ClusterPool,
) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    keys = {name: (await pool.key(name)).removeprefix("build:") for name in ("a", "b")}

    def work(connection: sa.Connection) -> dict[str, float]:
        insert = sa.text(
            "INSERT INTO derivation_metric (derivation, assignment, history_name, architecture, created_at,"
            " build_time_ms, oom_killed, concurrent_builds) SELECT d.id, :run, d.history_name, 'x', :at, :ms,"
            " :killed, 0 FROM derivation d WHERE d.name = 'a'"
        )
        # The twenty newest count; one that ran out of memory tells nothing.
        runs = [(1_000_000, False)] + [(2_000, False)] * 10 + [(4_000, False)] * 10 + [(9_000, True)]
        for number, (ms, killed) in enumerate(runs):
            row = {"run": f"run-{number}", "at": float(number), "ms": ms, "killed": killed}
            connection.execute(insert, row)
        return usual_build_secs(connection, sorted(keys.values()))

    assert await pool.run(work) == {keys["a"]: 3.0}
