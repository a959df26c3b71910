"""Every row of cluster-jobs.md, Recovery, as stored rows become a verdict; on both databases."""

import pytest
from gradient_protocol.kinds import FailureKind
from gradient_server.domain.events import (
    AssignmentClosed,
    ClusterChanged,
    ClusterQueued,
    JobQueued,
    MemberReported,
    ObjectUnused,
    PathStored,
)
from gradient_server.domain.status import ClusterStatus
from gradient_server.graph.settle import settle_verdict

from tests.fixtures.kill import assert_atomic, dump
from tests.integration.clusters.group import INSTANCE, ClusterPool, cluster, members
from tests.integration.graph.pool import derivation, hash_of, metrics, output_path


async def outcome(pool: ClusterPool, evaluation: str, name: str) -> str | None:
    found: str | None = await pool.scalar(
        "SELECT j.outcome FROM build_job j JOIN derivation d ON d.id = j.derivation"
        " WHERE j.evaluation = :evaluation AND d.name = :name",
        evaluation=evaluation,
        name=name,
    )
    return found


async def test_the_primarys_success_completes_and_ends_its_helpers(pool: ClusterPool) -> None:
    evaluation = await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b", primary="a"))
    group = await pool.start_group()
    helper, _ = await pool.assignment(group, "b")
    await pool.upload(helper, output_path("b"))
    reported = await pool.succeeds(group, "a")
    assert [type(event) for event in reported.events] == [MemberReported]
    assert not reported.closed
    assert await pool.statuses() == {"a": "Assigned", "b": "Assigned"}
    settlement = await pool.settle(group)
    assert settlement is not None
    assert settlement.verdict == "Complete"
    assert settlement.reason == "server 0 succeeded"
    assert settlement.survivors == [helper]
    assert await pool.attempts() == [("Succeeded", True)]
    assert await pool.cluster_status() == "Completed"
    assert await pool.statuses() == {"a": "Completed", "b": "Aborted"}
    # An aborted helper of a completed cluster counts as succeeded for its evaluation.
    assert await pool.evaluation_status(evaluation) == "Completed"
    assert await pool.scalar(
        "SELECT nar_hash FROM cached_path WHERE path = :p", p=output_path("a")
    ) == hash_of(output_path("a"))
    assert await pool.scalar("SELECT COUNT(*) FROM cached_path WHERE path = :p", p=output_path("b")) == 0
    assert await pool.scalar("SELECT COUNT(*) FROM upload WHERE NOT committed") == 0
    assert len(pool.seen(ObjectUnused)) == 1
    assert [event.path for event in pool.seen(PathStored)] == [output_path("a")]
    assert pool.seen(ClusterChanged)[-1].status is ClusterStatus.COMPLETED
    assert await pool.open_rows() == 0
    assert await pool.settle(group) is None


async def test_without_a_primary_only_the_last_success_completes(pool: ClusterPool) -> None:
    evaluation = await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    group = await pool.start_group()
    await pool.succeeds(group, "a")
    assert await pool.settle(group) is None
    assert await pool.statuses() == {"a": "Assigned", "b": "Assigned"}
    await pool.succeeds(group, "b")
    assert await pool.verdict(group) == "Complete"
    assert await pool.statuses() == {"a": "Completed", "b": "Completed"}
    assert await pool.evaluation_status(evaluation) == "Completed"


async def test_a_helpers_success_decides_nothing(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b", primary="a"))
    group = await pool.start_group()
    await pool.succeeds(group, "b")
    assert await pool.settle(group) is None
    await pool.succeeds(group, "a")
    assert await pool.verdict(group) == "Complete"
    assert await pool.statuses() == {"a": "Completed", "b": "Completed"}


async def test_retry_puts_every_member_back_and_drops_what_they_made(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b", "c"), cluster=cluster("a", "b", "c"))
    group = await pool.start_group()
    await pool.succeeds(group, "a")
    await pool.fails(group, "b")
    pool.events.clear()
    settlement = await pool.settle(group)
    assert settlement is not None
    assert settlement.verdict == "Retry"
    assert settlement.reason == "client 1: it ended Permanent; retry 1 of 1"
    assert settlement.survivors == [(await pool.assignment(group, "c"))[0]]
    assert set((await pool.statuses()).values()) == {"Queued"}
    assert await pool.attempts() == [("Failed", True)]
    [info] = await pool.infos()
    assert (info.status, info.attempts, info.open_attempt) == (ClusterStatus.QUEUED, 1, None)
    assert await pool.scalar("SELECT COUNT(*) FROM cached_path WHERE path = :p", p=output_path("a")) == 0
    assert len(pool.seen(ObjectUnused)) == 1
    assert await pool.scalar("SELECT MAX(attempts) FROM derivation_build") == 0
    kinds = [type(event) for event in pool.events]
    assert max(i for i, k in enumerate(kinds) if k is AssignmentClosed) < kinds.index(JobQueued)
    assert len(pool.seen(JobQueued)) == 3
    assert pool.seen(ClusterQueued)[-1].cluster == info
    # The whole of it starts again, and can succeed.
    again = await pool.start_group()
    for name in "abc":
        await pool.succeeds(again, name)
    assert await pool.verdict(again) == "Complete"


async def test_fail_without_budget_settles_each_by_its_own_outcome(pool: ClusterPool) -> None:
    evaluation = await pool.with_cluster(
        *members("a", "b", "c"), cluster=cluster("a", "b", "c", retry_budget=0)
    )
    group = await pool.start_group()
    await pool.succeeds(group, "a")
    await pool.fails(group, "b", FailureKind.TRANSIENT)
    settlement = await pool.settle(group)
    assert settlement is not None
    assert settlement.verdict == "Fail"
    assert await pool.statuses() == {"a": "Completed", "b": "Failed", "c": "Aborted"}
    # A kind that would be requeued becomes Permanent.
    kind = await pool.scalar("SELECT failure_kind FROM derivation_build WHERE status = 'Failed'")
    assert kind == "Permanent"
    assert await pool.attempts() == [("Failed", True)]
    assert await pool.cluster_status() == "Failed"
    assert await pool.evaluation_status(evaluation) == "Failed"
    assert await outcome(pool, evaluation, "c") == "Aborted"
    assert not pool.queued


@pytest.mark.parametrize("budget", [0, 1, 2])
async def test_the_retry_budget_counts_started_attempts(pool: ClusterPool, budget: int) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b", retry_budget=budget))
    verdicts = []
    for _ in range(budget + 1):
        held = await pool.hold_group()
        assert (await pool.fail_prepare(held))[0]
        group = await pool.start_group()
        await pool.fails(group, "b")
        verdicts.append(await pool.verdict(group))
    assert verdicts == ["Retry"] * budget + ["Fail"]


async def test_a_member_that_can_no_longer_start_fails_the_cluster(pool: ClusterPool) -> None:
    await pool.with_cluster(
        derivation("base"), derivation("a", "base"), *members("b"), cluster=cluster("a", "b")
    )
    await pool.build(await pool.key("base"))
    group = await pool.start_group()
    await pool.run(
        lambda c: c.exec_driver_sql(
            "UPDATE derivation_build SET status = 'Failed' WHERE derivation ="
            " (SELECT id FROM derivation WHERE name = 'base')"
        )
    )
    await pool.fails(group, "b", FailureKind.TRANSIENT)
    settlement = await pool.settle(group)
    assert settlement is not None
    assert settlement.verdict == "Fail"
    assert settlement.reason.endswith("a member can no longer start")


async def test_the_first_deciding_report_wins(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b", primary="a", retry_budget=2))
    failed_first = await pool.start_group()
    await pool.fails(failed_first, "b")
    await pool.succeeds(failed_first, "a")
    assert await pool.verdict(failed_first) == "Retry"
    succeeded_first = await pool.start_group()
    await pool.succeeds(succeeded_first, "a")
    await pool.fails(succeeded_first, "b")
    assert await pool.verdict(succeeded_first) == "Complete"
    # A report that came before the settlement settles by the decided verdict.
    assert await pool.statuses() == {"a": "Completed", "b": "Failed"}


async def test_a_helper_that_broke_by_chance_after_the_primarys_success_is_aborted(pool: ClusterPool) -> None:
    evaluation = await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b", primary="a"))
    group = await pool.start_group()
    await pool.succeeds(group, "a")
    await pool.fails(group, "b", FailureKind.TRANSIENT)
    assert await pool.verdict(group) == "Complete"
    assert await pool.statuses() == {"a": "Completed", "b": "Aborted"}
    assert await pool.evaluation_status(evaluation) == "Completed"


async def test_a_lost_member_is_a_failure_and_a_reported_one_cannot_be_lost(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    group = await pool.start_group()
    await pool.succeeds(group, "a")
    reported, _ = await pool.assignment(group, "a")
    silent, worker = await pool.assignment(group, "b")
    assert await pool.settle(group, lost={reported: "its worker is gone"}) is None
    settlement = await pool.settle(group, lost={silent: "its worker is gone"})
    assert settlement is not None
    assert settlement.verdict == "Retry"
    assert settlement.reason == "client 1: its worker is gone; retry 1 of 1"
    row = await pool.scalar("SELECT status FROM dispatched_job WHERE id = :id", id=silent)
    assert row == "Abandoned"
    # It comes back after all: acknowledged, told to whoever waits for it, and of no effect.
    late = await pool.complete(silent, worker)
    assert late.refused is None
    assert late.error is None
    assert late.events == [MemberReported(group.attempt, silent)]
    assert await pool.statuses() == {"a": "Queued", "b": "Queued"}


async def test_a_success_without_its_upload_is_a_failure(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b", primary="a"))
    group = await pool.start_group()
    await pool.succeeds(group, "a", upload=False)
    settlement = await pool.settle(group)
    assert settlement is not None
    assert settlement.verdict == "Retry"
    assert "is not in the server's store" in settlement.reason


async def test_a_missing_input_is_made_again_within_the_verdict(pool: ClusterPool) -> None:
    await pool.with_cluster(
        derivation("base"), derivation("a", "base"), *members("b"), cluster=cluster("a", "b")
    )
    await pool.build(await pool.key("base"))
    group = await pool.start_group()
    await pool.fails(group, "a", FailureKind.INPUTS_UNAVAILABLE, missing=[output_path("base")])
    assert await pool.verdict(group) == "Retry"
    assert await pool.statuses() == {"base": "Queued", "a": "Created", "b": "Queued"}
    assert await pool.scalar("SELECT COUNT(*) FROM cached_path WHERE path = :p", p=output_path("base")) == 0
    await pool.build(await pool.key("base"))
    assert (await pool.statuses())["a"] == "Queued"
    await pool.start_group()


async def test_an_out_of_memory_kill_leaves_its_peak(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    group = await pool.start_group()
    used = metrics(peak_ram_mb=700, oom_killed=True)
    await pool.fails(group, "a", FailureKind.OUT_OF_MEMORY, used=used)
    assert await pool.verdict(group) == "Retry"
    assert await pool.scalar("SELECT MAX(peak_ram_mb) FROM derivation_build") == 700
    assert await pool.scalar("SELECT COUNT(*) FROM derivation_metric WHERE oom_killed") == 1


async def test_what_needs_an_aborted_member_fails_with_it(pool: ClusterPool) -> None:
    graph = [*members("a", "b"), derivation("top", "b")]
    evaluation = await pool.with_cluster(*graph, cluster=cluster("a", "b", retry_budget=0))
    group = await pool.start_group()
    await pool.fails(group, "a")
    assert await pool.verdict(group) == "Fail"
    assert await pool.statuses() == {"a": "Failed", "b": "Aborted", "top": "DependencyFailed"}
    assert await pool.evaluation_status(evaluation) == "Failed"


async def test_another_instances_attempt_is_left_alone(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    group = await pool.start_group()
    await pool.fails(group, "a")
    await pool.run(lambda c: c.exec_driver_sql("UPDATE cluster_attempt SET instance = 'other'"))
    before = await pool.database.read(dump)
    assert await pool.settle(group) is None
    assert await pool.database.read(dump) == before


@pytest.mark.parametrize("verdict", ["Complete", "Retry", "Fail"])
async def test_nothing_of_a_verdict_is_left_wherever_it_is_killed(pool: ClusterPool, verdict: str) -> None:
    budget = 0 if verdict == "Fail" else 1
    await pool.with_cluster(
        *members("a", "b", "c"), cluster=cluster("a", "b", "c", primary="a", retry_budget=budget)
    )
    group = await pool.start_group()
    await pool.succeeds(group, "b")
    if verdict == "Complete":
        await pool.succeeds(group, "a")
    else:
        await pool.fails(group, "a")
    settlement = await assert_atomic(
        pool.database,
        lambda c: settle_verdict(c, group.attempt, instance_id=INSTANCE, now=pool.clock.now(), ids=pool.ids),
    )
    assert settlement is not None
    assert settlement.verdict == verdict
    assert await pool.open_rows() == 0
