"""Runner, machines and book with workers that fail in every way, step by step, transactions included.

Workers are simulated as protocol.md has them: they hold, start, report, lose connections and messages,
and end a hold by their own clock. After every step the invariants hold; with the faults over, every
cluster ends.
"""

from dataclasses import replace

import trio
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.server import AbortCluster, AssignJob, StartCluster
from gradient_protocol.messages.worker import AssignJobResponse
from gradient_server.cluster.states import Seat
from gradient_server.cluster.verdict import MemberState
from gradient_server.domain.status import AttemptOutcome, ClusterStatus
from gradient_server.scheduler.model import AssignedJob
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fakes.cluster import ClusterWorld, cluster_info
from tests.fakes.scheduler import worker
from tests.properties.cluster.hosts import Held, Host

WORKERS = ("a", "b", "c", "d")
A_WORKER = st.sampled_from(WORKERS)


class Faults(RuleBasedStateMachine):
    """Four hosts, up to three clusters of two or three members."""

    def __init__(self) -> None:
        super().__init__()
        self.world = ClusterWorld()
        self.hosts = {name: Host(name) for name in WORKERS}
        self.count = 0
        self.starts: set[str] = set()
        for host in self.hosts.values():
            self.connect(host)

    # The world moves

    @initialize(members=st.integers(2, 3), budget=st.integers(0, 2), primary=st.booleans())
    def first(self, members: int, budget: int, primary: bool) -> None:
        self.submit(members=members, budget=budget, primary=primary)

    @rule(hosts=st.lists(A_WORKER, min_size=1, max_size=4, unique=True), commits=st.integers(0, 4))
    def proceed(self, hosts: list[str], commits: int) -> None:
        """Some hosts ask, a pass, some transactions, and some hosts answer."""
        for name in hosts:
            self.ask(name=name)
        self.plan()
        for _ in range(commits):
            self.commit(steps=1)
        for name in hosts:
            self.hear(name=name)

    @rule(but=st.sampled_from([None, *WORKERS]), rounds=st.integers(1, 3))
    def go_well(self, but: str | None, rounds: int) -> None:
        """All hosts but one do what they should."""
        hosts = [name for name in WORKERS if name != but]
        for name in hosts:
            if not self.hosts[name].connected:
                self.connect(self.hosts[name])
        for _ in range(rounds):
            self.proceed(hosts=hosts, commits=4)

    @precondition(lambda self: self.count < 3)
    @rule(members=st.integers(2, 3), budget=st.integers(0, 2), primary=st.booleans())
    def submit(self, members: int, budget: int, primary: bool) -> None:
        self.count += 1
        info = cluster_info(f"k{self.count}", members=members, retry_budget=budget)
        if primary:
            first = replace(info.members[0], primary=True)
            info = replace(info, members=(first, *info.members[1:]))
        self.world.submit(info)

    @rule()
    def plan(self) -> None:
        self.world.runner.passes.run_one()

    @rule(steps=st.integers(1, 3))
    def commit(self, steps: int) -> None:
        for _ in range(steps):
            if self.world.runner.executor.has_work:
                trio.run(self.world.runner.executor.work_one)

    @rule(seconds=st.sampled_from([0.5, 5.0, 11.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.clock.passed += seconds
        for host in self.hosts.values():
            self.expire(host)
        trio.run(self.world.scheduler.loops.tick)
        trio.run(self.world.drain_lookups)

    @rule(pick=st.integers(0, 3))
    def want_again(self, pick: int) -> None:
        """The store lost the output of a completed cluster; its last members may still be stopping."""
        infos = self.world.clusters.clusters.values()
        completed = [info.id for info in infos if info.status is ClusterStatus.COMPLETED]
        if completed:
            self.world.bus.publish(self.world.clusters.revive(completed[pick % len(completed)]))

    @rule()
    def complete_and_want_again(self) -> None:
        """A primary succeeds, and its cluster is wanted again before a helper has heard of it."""
        infos = self.world.clusters.clusters.values()
        primaries = {info.members[0].job_key for info in infos if info.members[0].primary}
        for name, host in self.hosts.items():
            if host.runs and any(one.job_id in primaries for one in host.has.values()):
                self.finish(name=name, state=MemberState.SUCCEEDED)
                self.commit(steps=3)
                self.want_again(pick=0)

    # Hosts do what they should

    @rule(name=A_WORKER)
    def hear(self, name: str) -> None:
        """The host reads everything that was sent to it, and answers."""
        self.read(self.hosts[name], answer=True)

    @rule(name=A_WORKER)
    def ask(self, name: str) -> None:
        host = self.hosts[name]
        if host.connected and not host.busy:
            self.world.scheduler.request_job(name, JobKind.BUILD)

    @rule(name=A_WORKER, state=st.sampled_from([MemberState.SUCCEEDED, MemberState.FAILED]))
    def finish(self, name: str, state: MemberState) -> None:
        host = self.hosts[name]
        for one in host.has.values():
            if one.running and one.report is None:
                one.report = state
        self.tell(host)

    # Faults

    @rule(name=A_WORKER)
    def lose_answers(self, name: str) -> None:
        """The host reads and its answers are lost with the connection."""
        host = self.hosts[name]
        self.read(host, answer=False)
        self.cut(host)

    @rule(name=A_WORKER)
    def reject(self, name: str) -> None:
        self.read(self.hosts[name], answer=True, reject=True)

    @rule(name=A_WORKER)
    def cut_link(self, name: str) -> None:
        self.cut(self.hosts[name])

    @rule(name=A_WORKER)
    def come_back(self, name: str) -> None:
        if not self.hosts[name].connected:
            self.connect(self.hosts[name])

    @rule(name=A_WORKER)
    def crash(self, name: str) -> None:
        """The host forgets everything, and may come back without it."""
        self.cut(self.hosts[name])
        self.hosts[name].has.clear()

    @rule(name=A_WORKER)
    def give_up(self, name: str) -> None:
        host = self.hosts[name]
        if not host.connected and self.world.clock.passed - host.away_since > 60.0:
            host.given_up = True
            self.world.scheduler.worker_lost(name)

    @precondition(lambda self: self.world.clusters.attempts)
    @rule(really=st.integers(0, 2))
    def restart_server(self, really: int) -> None:
        """It dies between any two transactions, and its successor has the database alone."""
        if really:
            return
        for host in self.hosts.values():
            host.connected, host.away_since, host.given_up = False, self.world.clock.passed, False
        self.world = trio.run(self.world.restarted)

    @rule(commits=st.integers(0, 3))
    def fail_and_restart_server(self, commits: int) -> None:
        """A member fails, the server dies somewhere in the verdict, and all come back but the survivors."""
        running = [name for name, host in self.hosts.items() if host.runs]
        if len(running) < 2:
            return
        self.finish(name=running[0], state=MemberState.FAILED)
        self.commit(steps=commits)
        self.restart_server(really=0)
        others = [name for name in WORKERS if name not in running[1:]]
        for name in others:
            self.connect(self.hosts[name])
        self.proceed(hosts=others, commits=4)

    @precondition(lambda self: self.count > 1)
    @rule(data=st.data(), really=st.integers(0, 3))
    def abort(self, data: st.DataObject, really: int) -> None:
        if really:
            return
        cluster_id = data.draw(st.sampled_from(sorted(self.world.clusters.clusters)))
        if not self.world.clusters.clusters[cluster_id].status.is_final:
            self.world.bus.publish(self.world.clusters.abort(cluster_id))

    # The hosts' side of the protocol

    def connect(self, host: Host) -> None:
        host.connected, host.given_up = True, False
        store = self.world.clusters
        live = {
            one.assignment_id: attempt
            for attempt in store.attempts.values()
            if attempt.outcome is None
            for one in attempt.claims
            if one.worker_id == host.name
        }
        adopted = {key: host.has[key] for key in live if key in host.has}
        reported = {key for attempt in live.values() for key in attempt.reports}
        lost = [key for key in live if key not in host.has and key not in reported]
        host.has = dict(adopted)
        working = [
            AssignedJob(
                assignment_id=one.assignment_id,
                job_id=one.job_id,
                kind=JobKind.BUILD,
                cluster_attempt=one.attempt,
            )
            for one in adopted.values()
            if one.report is None and one.assignment_id not in reported
        ]
        self.world.connect(worker(host.name, max_concurrent_builds=1), working)
        self.world.runner.worker_resumed(
            host.name,
            [(one.assignment_id, one.attempt, not one.running, 0) for one in adopted.values()],
            lost,
        )
        self.tell(host)

    def cut(self, host: Host) -> None:
        if host.connected:
            host.connected = False
            host.away_since = self.world.clock.passed
            self.world.scheduler.worker_disconnected(host.name)

    def read(self, host: Host, *, answer: bool, reject: bool = False) -> None:
        if not host.connected:
            return
        outbox = self.world.outboxes[host.name]
        sent, outbox.sent = outbox.sent, []
        for message in sent:
            if isinstance(message, AssignJob):
                self.assigned(host, message, answer=answer, reject=reject)
            elif isinstance(message, StartCluster):
                self.started(host, message)
            elif isinstance(message, AbortCluster):
                self.aborted(host, message)
        if answer:
            self.tell(host)

    def assigned(self, host: Host, message: AssignJob, *, answer: bool, reject: bool) -> None:
        assert message.cluster is not None
        attempt = message.cluster.attempt
        second = any(one.attempt == attempt for one in host.has.values())
        assert not second, "two members of one attempt at one worker"
        self.none_is_left_of_earlier_attempts(attempt)
        takes = not reject and attempt not in host.aborted
        if takes:
            until = self.world.clock.monotonic() + message.cluster.hold_secs
            host.has[message.assignment_id] = Held(message.assignment_id, message.job_id, attempt, until)
        if answer:
            response = AssignJobResponse(assignment_id=message.assignment_id, accepted=takes, reason="no")
            self.world.scheduler.answer_arrived(host.name, response)
            trio.run(self.world.scheduler.assignment_answered, host.name, response)

    def none_is_left_of_earlier_attempts(self, attempt: str) -> None:
        """A retry waits for the survivors: 300 s at most, and not for hosts that were given up. Of a
        completed cluster that runs again the members that still stop are other builds.
        """
        store = self.world.clusters
        cluster_id = store.attempts[attempt].cluster_id
        for host in self.hosts.values():
            for one in host.has.values():
                other = store.attempts[one.attempt]
                if one.attempt != attempt and other.cluster_id == cluster_id and one.running:
                    if other.outcome is AttemptOutcome.SUCCEEDED:
                        continue
                    assert other.closed_at is not None
                    late = self.world.clock.monotonic() - other.closed_at
                    assert host.given_up or one.report is not None or late >= 300.0, "a survivor still runs"

    def started(self, host: Host, message: StartCluster) -> None:
        attempt = self.world.clusters.attempts[message.attempt]
        assert attempt.started, "a member was told to start before the start was stored"
        self.starts.add(message.attempt)
        for one in host.has.values():
            if one.attempt == message.attempt and one.report is None:
                one.running = True

    def aborted(self, host: Host, message: AbortCluster) -> None:
        host.aborted.add(message.attempt)
        for one in list(host.has.values()):
            if one.attempt == message.attempt and one.report is None:
                if one.running:
                    one.report = MemberState.ABORTED
                else:
                    del host.has[one.assignment_id]

    def expire(self, host: Host) -> None:
        for one in host.has.values():
            if not one.running and one.report is None and self.world.clock.monotonic() >= one.until:
                one.report = MemberState.ABORTED
        self.tell(host)

    def tell(self, host: Host) -> None:
        """Sends the final reports that are owed."""
        if not host.connected:
            return
        for one in list(host.has.values()):
            if one.report is not None:
                self.world.bus.publish(self.world.clusters.report(one.assignment_id, one.report))
                self.world.runner.final_report(one.assignment_id)
                del host.has[one.assignment_id]

    # What must hold

    @invariant()
    def the_schedulers_figures_agree(self) -> None:
        self.world.check()
        for host in self.world.scheduler.pool:
            assert all(slots.open >= 0 for slots in host.slots.values())

    @invariant()
    def a_cluster_has_at_most_one_open_attempt(self) -> None:
        for cluster_id in self.world.clusters.clusters:
            assert len(self.world.clusters.open_attempts(cluster_id)) <= 1

    @invariant()
    def a_member_is_in_one_place(self) -> None:
        runner, tracker = self.world.runner, self.world.scheduler.tracker
        waiting = {key for entry in runner.book.clusters.values() for key in entry.arrived}
        assigned = set(self.world.scheduler.pool.by_job)
        assert not waiting & assigned
        assert waiting <= set(tracker.members)

    @invariant()
    def an_open_attempt_is_known_and_started_as_a_whole(self) -> None:
        runner = self.world.runner
        for attempt in self.world.clusters.attempts.values():
            if attempt.outcome is None:
                known = runner.attempts.get(attempt.id)
                assert known is not None
        for known in runner.attempts:
            seats = set(known.machine.seats.values())
            if Seat.RUNNING in seats:
                assert not seats & {Seat.SEATED, Seat.SENT, Seat.HELD, Seat.SPOILED}
                assert self.world.clusters.attempts[known.id].started

    @invariant()
    def a_reserved_seat_is_of_a_cluster_that_waits(self) -> None:
        held = self.world.runner.desk.held
        if held is not None:
            assert self.world.clusters.clusters[held.cluster_id].status is not ClusterStatus.RUNNING

    def teardown(self) -> None:
        """The faults are over: within an hour every cluster has ended."""
        for host in self.hosts.values():
            if not host.connected:
                self.connect(host)
        for _ in range(360):
            trio.run(self.world.drain_work)
            if all(info.status.is_final for info in self.world.clusters.clusters.values()):
                break
            for name, host in self.hosts.items():
                self.read(host, answer=True)
                for one in host.has.values():
                    one.report = one.report or (MemberState.SUCCEEDED if one.running else None)
                self.tell(host)
                self.ask(name=name)
            self.pass_time(seconds=10.0)
            self.plan()
        states = {key: info.status for key, info in self.world.clusters.clusters.items()}
        assert all(status.is_final for status in states.values()), states
        for host in self.hosts.values():
            self.read(host, answer=True)
        trio.run(self.world.drain_work)
        self.world.clock.passed += 301.0
        self.plan()
        assert len(self.world.runner.attempts) == 0
        assert self.world.scheduler.pool.assignments == {}
        assert self.world.runner.desk.held is None


TestFaults = Faults.TestCase
TestFaults.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
