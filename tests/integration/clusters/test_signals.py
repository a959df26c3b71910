"""Signals as rows: one order an attempt, each to whom it is meant, limits with an answer (protocol.md)."""

import pytest
from gradient_protocol.kinds import ResumeState
from gradient_protocol.messages.shapes import SignalTarget
from gradient_protocol.messages.worker import ClusterSignalReport, ResumedJob
from gradient_server.db.queries import reservations, signals
from gradient_server.db.queries.reservations import Reservation
from gradient_server.domain.events import SignalDropped, SignalStored
from gradient_server.graph.resume import resume
from gradient_server.graph.settle import abort_cluster
from gradient_server.graph.signals import signals_for

from tests.integration.clusters.group import INSTANCE, ClusterPool, Group, cluster, members, race


async def three(pool: ClusterPool) -> Group:
    await pool.with_cluster(*members("a", "b", "c"), cluster=cluster("a", "b", "c", primary="a"))
    return await pool.start_group()


async def received(pool: ClusterPool, group: Group, name: str, after: int = 0) -> list[tuple[int, str]]:
    assignment, _ = await pool.assignment(group, name)
    found = await pool.database.read(lambda c: signals_for(c, assignment, after))
    return [(signal.n, signal.topic) for signal in found]


async def test_everyone_receives_what_is_meant_for_him_in_one_order(pool: ClusterPool) -> None:
    group = await three(pool)
    outcome = await pool.signal(group, "a", "1-all")
    assert outcome.events == [SignalStored(group.attempt, 1)]
    await pool.signal(group, "b", "2-server", to=SignalTarget(role="server"))
    await pool.signal(group, "a", "3-clients", to=SignalTarget(role="client"))
    await pool.signal(group, "a", "4-client-1", to=SignalTarget(role="client", index=1))
    await pool.signal(group, "c", "5-all")
    assert await received(pool, group, "a") == [(2, "2-server"), (5, "5-all")]
    assert await received(pool, group, "b") == [(1, "1-all"), (3, "3-clients"), (5, "5-all")]
    assert await received(pool, group, "c") == [(1, "1-all"), (3, "3-clients"), (4, "4-client-1")]
    assert await received(pool, group, "c", after=3) == [(4, "4-client-1")]
    [found] = await pool.database.read(lambda c: signals.signals_after(c, group.attempt, 4, "server", 0))
    assert (found.sender_role, found.sender_index, found.payload) == ("client", 1, b"here")


async def test_a_repeated_report_stores_its_signal_once(pool: ClusterPool) -> None:
    group = await three(pool)
    await pool.signal(group, "a", seq=1)
    again = await pool.signal(group, "a", seq=1)
    assert again.acknowledge == 1
    assert again.signal_refused is None
    assert not again.events
    assert await received(pool, group, "b") == [(1, "address")]


@pytest.mark.parametrize("case", ["held", "not an attempt", "to nobody", "over"])
async def test_what_is_dropped_is_acknowledged_and_counted(pool: ClusterPool, case: str) -> None:
    await pool.with_cluster(*members("a", "b", "c"), cluster=cluster("a", "b", "c", primary="a"))
    group = await (pool.hold_group() if case == "held" else pool.start_group())
    fields = {}
    if case == "not an attempt":
        fields["attempt"] = "another"
    if case == "over":
        wanted = await pool.cluster_id()
        await pool.run(lambda c: abort_cluster(c, wanted, now=pool.clock.now(), ids=pool.ids))
    to = SignalTarget(role="client", index=7) if case == "to nobody" else None
    outcome = await pool.signal(group, "a", to=to, **fields)
    assert outcome.acknowledge == 1
    assert outcome.refused is None
    assert outcome.signal_refused is None
    assert [type(event) for event in outcome.events] == [SignalDropped]
    assert await pool.scalar("SELECT COUNT(*) FROM cluster_signal") == 0


async def test_a_signal_of_a_single_job_is_dropped(pool: ClusterPool) -> None:
    group = await three(pool)
    await pool.evaluate(await pool.submit(), members("alone"))
    key = await pool.key("alone")
    assignment = await pool.claim(key, f"on-{key}")
    assert assignment is not None
    group.assignments[key] = assignment
    outcome = await pool.signal(group, "alone")
    assert [type(event) for event in outcome.events] == [SignalDropped]
    assert await received(pool, group, "b") == []


async def test_a_signal_from_who_has_not_the_assignment_is_dropped(pool: ClusterPool) -> None:
    group = await three(pool)
    stranger = await pool.assignment(group, "b")
    for sender in (("unknown", stranger[1]), ((await pool.assignment(group, "a"))[0], stranger[1])):
        message = ClusterSignalReport(
            assignment_id=sender[0], seq=1, attempt=group.attempt, topic="t", payload=b""
        )
        outcome = await pool.report(message, sender[1])
        assert (outcome.acknowledge, outcome.error) == (1, None)
        assert [type(event) for event in outcome.events] == [SignalDropped]
    assert await pool.scalar("SELECT COUNT(*) FROM cluster_signal") == 0


async def test_a_signal_that_was_stored_and_comes_again_after_the_end_is_not_counted(
    pool: ClusterPool,
) -> None:
    group = await three(pool)
    assert (await pool.signal(group, "a", seq=1)).acknowledge == 1
    wanted = await pool.cluster_id()
    await pool.run(lambda c: abort_cluster(c, wanted, now=pool.clock.now(), ids=pool.ids))
    assert (await pool.signal(group, "a", seq=1)).events == []
    assert [type(event) for event in (await pool.signal(group, "a", seq=2)).events] == [SignalDropped]


async def test_what_is_refused_is_told_and_told_again(pool: ClusterPool) -> None:
    group = await three(pool)
    big = await pool.signal(group, "a", payload=b"x" * (64 * 1024 + 1))
    assert big.signal_refused == "a payload has at most 64 KiB"
    assert big.acknowledge == 1
    reserved = await pool.signal(group, "a", "gradient.other")
    assert reserved.signal_refused == "topics that begin with 'gradient.' are reserved"
    narrow = await pool.signal(group, "a", "gradient.barrier", to=SignalTarget(role="client"))
    assert narrow.signal_refused == "a barrier is for all members"
    assert (await pool.signal(group, "a", "gradient.barrier", b"ready")).signal_refused is None
    assert (await pool.signal(group, "a", "")).signal_refused is not None
    assert (await pool.signal(group, "a", payload=b"x" * (64 * 1024))).signal_refused is None
    # The acknowledgement was lost: the same answer again, and to a good one none.
    again = await pool.signal(group, "a", seq=2)
    assert (again.acknowledge, again.signal_refused) == (2, reserved.signal_refused)
    assert (await pool.signal(group, "a", seq=4)).signal_refused is None
    assert await received(pool, group, "b") == [(1, "gradient.barrier"), (2, "address")]
    assert not await pool.scalar("SELECT COUNT(*) FROM dispatched_job WHERE refused_seq IS NOT NULL")


async def test_an_acknowledgement_never_covers_a_refusal_that_may_be_unheard(pool: ClusterPool) -> None:
    group = await three(pool)
    assignment, worker = await pool.assignment(group, "a")
    worker_id = await pool.worker(worker)
    for topic in ("good", "gradient.bad", "good", "gradient.worse", "good"):
        await pool.signal(group, "a", topic)

    async def resumed(seq: int) -> int:
        listed = ResumedJob(
            assignment_id=assignment,
            job_id=await pool.key("a"),
            state=ResumeState.RUNNING,
            seq=seq,
        )
        decision = await pool.run(
            lambda c: resume(
                c,
                worker_id=worker_id,
                instance_id=INSTANCE,
                running=[listed],
                now=pool.clock.now(),
                ids=pool.ids,
            )
        )
        return decision.adopted[0].seq

    assert [await resumed(seq) for seq in range(6)] == [1, 1, 3, 3, 5, 5]
    # And what is sent again from there is acknowledged no further than the next refusal.
    assert (await pool.signal(group, "a", "good", seq=3)).acknowledge == 3
    assert (await pool.signal(group, "a", "good", seq=1)).acknowledge == 1
    assert (await pool.signal(group, "a", "good", seq=5)).acknowledge == 5


@pytest.mark.parametrize("limit", ["signals", "bytes"])
async def test_an_attempt_has_its_limits(pool: ClusterPool, limit: str) -> None:
    group = await three(pool)
    column, most = (
        ("signal_count", signals.MAX_SIGNALS) if limit == "signals" else ("signal_bytes", 8 * 1024 * 1024 - 3)
    )
    text = f"UPDATE cluster_attempt SET {column} = {most - 1}"
    await pool.run(lambda c: c.exec_driver_sql(text))
    assert (await pool.signal(group, "a")).signal_refused is None
    refused = await pool.signal(group, "b")
    assert refused.signal_refused == "the attempt has sent its 10000 signals or 8 MiB of payloads"
    # A new attempt begins anew.
    assert await pool.settle(group, lost={(await pool.assignment(group, "a"))[0]: "gone"}) is not None
    assert (await pool.signal(await pool.start_group(), "a")).events


async def test_signals_that_meet_get_numbers_without_a_gap(pool: ClusterPool) -> None:
    group = await three(pool)
    numbers = await race(
        pool,
        *(
            lambda c, n=n: signals.append_signal(
                c,
                group.attempt,
                sender=("client", n % 2),
                to_role=None,
                to_index=None,
                topic="t",
                payload=b"",
                now=pool.clock.now(),
            )
            for n in range(4)
        ),
    )
    assert sorted(numbers) == [1, 2, 3, 4]  # type: ignore[type-var]  # they are numbers


# The reservation


async def test_the_pool_has_one_reservation(pool: ClusterPool) -> None:
    clusters = []
    for name in ("first", "second"):
        await pool.with_cluster(
            *members(f"{name}-a", f"{name}-b"), cluster=cluster(f"{name}-a", f"{name}-b", name=name)
        )
        clusters.append(await pool.cluster_id())
    wanted = [
        Reservation(cluster_id=c, instance_id=i, reserved_at=5.0, seats={"build:x": "w1"})
        for c, i in zip(clusters, ("one", "two"), strict=True)
    ]
    taken = await race(pool, *(lambda c, r=r: reservations.take_reservation(c, r) for r in wanted))
    assert sorted(map(bool, taken)) == [False, True]
    held = wanted[taken.index(True)]
    assert await pool.database.read(reservations.find_reservation) == held
    owner, other = held.instance_id, "nobody"
    seats = {"build:x": "w2"}
    assert not await pool.run(lambda c: reservations.update_reservation(c, held.cluster_id, other, seats))
    assert await pool.run(lambda c: reservations.update_reservation(c, held.cluster_id, owner, seats))
    assert not await pool.run(lambda c: reservations.release_reservation(c, held.cluster_id, other))
    found = await pool.database.read(reservations.find_reservation)
    assert found is not None
    assert found.seats == seats
    assert await pool.run(lambda c: reservations.release_reservation(c, held.cluster_id, owner))
    assert await pool.database.read(reservations.find_reservation) is None


async def test_a_cluster_that_ends_gives_the_reservation_back(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    wanted = await pool.cluster_id()
    held = Reservation(cluster_id=wanted, instance_id="one", reserved_at=5.0, seats={})
    assert await pool.run(lambda c: reservations.take_reservation(c, held))
    await pool.run(lambda c: abort_cluster(c, wanted, now=pool.clock.now(), ids=pool.ids))
    assert await pool.database.read(reservations.find_reservation) is None
    assert not await pool.run(lambda c: reservations.take_reservation(c, held))
