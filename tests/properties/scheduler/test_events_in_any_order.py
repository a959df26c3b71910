"""Whatever happens in whatever order, the scheduler's figures agree with the facts.

The store is the truth: what it has open or queued, and nothing else, is what the scheduler must
know once everything has settled. After each step every invariant is checked.
"""

import random
from typing import TypeVar

import hypothesis.strategies as st
import msgspec
import trio
from gradient_protocol.kinds import JobKind, JobStage
from gradient_protocol.messages.server import AssignJob
from gradient_protocol.messages.worker import AssignJobResponse
from gradient_server.domain.events import AbortWanted, JobUnqueued
from gradient_server.domain.job import PendingJob
from gradient_server.domain.status import AbortReason
from gradient_server.scheduler.model import AssignedJob, AssignmentState
from hypothesis import given, settings

from tests.fakes.scheduler import START, World, build, evaluation, metrics, worker

T = TypeVar("T")

INFOS = [
    worker("a"),
    worker("b", fetch=False, max_concurrent_builds=1),
    worker("c", evaluates=False, projects=frozenset({"q"}), ram_total_mb=2000),
]
FIELDS: list[dict[str, object]] = [
    {},
    {"peak_ram_mb": 1500},
    {"prioritized": True, "projects": ("q",)},
    {"not_before": START + 12, "projects": ("p", "q")},
    {"cluster": "c"},
]


class Life:
    """A pool, its store, and the workers' side of it. Each step takes a number and a flag."""

    def __init__(self) -> None:
        self.world = World()
        self.store = self.world.store
        self.scheduler = self.world.scheduler
        self.jobs = 0
        self.unanswered: list[tuple[str, AssignJob]] = []
        self.answered: list[tuple[str, AssignJob]] = []
        self.elsewhere: list[PendingJob] = []
        for info in INFOS:
            self.world.connect(info)

    # What the graph does

    async def queue(self, number: int, flag: bool) -> None:
        self.jobs += 1
        make = evaluation if flag and number % 3 == 0 else build
        self.world.queue(make(f"{self.jobs:03}", **FIELDS[number % len(FIELDS)]))

    async def queue_again(self, number: int, flag: bool) -> None:
        if self.store.queued:
            self.world.queue(self.store.queued[_pick(sorted(self.store.queued), number)])

    async def unqueue(self, number: int, flag: bool) -> None:
        if self.store.queued:
            job_id = _pick(sorted(self.store.queued), number)
            del self.store.queued[job_id]
            self.world.bus.publish([JobUnqueued(job_id, "aborted")])

    async def another_instance(self, number: int, flag: bool) -> None:
        """It tells nobody what it takes; what it gives back is told, or found after a lost claim."""
        if flag and self.store.queued:
            self.elsewhere.append(self.store.queued.pop(_pick(sorted(self.store.queued), number)))
        elif self.elsewhere:
            job = self.elsewhere.pop()
            self.store.queued[job.job_id] = job
            if job.job_id not in self.scheduler.dispatcher.lost:
                self.world.queue(job)

    async def finish(self, number: int, flag: bool) -> None:
        accepted = sorted(self.store.accepted & self.store.open.keys())
        if accepted:
            events = (self.store.requeue if number % 2 else self.store.close)(_pick(accepted, number))
            self.world.bus.publish(events[::-1] if flag else events)

    # What the workers do

    async def connect(self, number: int, flag: bool) -> None:
        name = INFOS[number % 3].id
        self._part(name)
        if flag:  # it lists nothing: what it had waits again
            for one in [one for one, request in self.store.open.items() if request.worker_id == name]:
                self.world.bus.publish(self.store.requeue(one))
        self.world.connect(INFOS[number % 3], self._listed(name))

    async def disconnect(self, number: int, flag: bool) -> None:
        name = INFOS[number % 3].id
        self._part(name)
        self.scheduler.worker_disconnected(name)
        if flag:
            for one in [one for one, request in self.store.open.items() if request.worker_id == name]:
                self.world.bus.publish(self.store.requeue(one))
            self.scheduler.worker_lost(name)

    async def request(self, number: int, flag: bool) -> None:
        for _ in range(1 + flag):
            self.scheduler.request_job(INFOS[number % 3].id, list(JobKind)[number % 2])

    async def score(self, number: int, flag: bool) -> None:
        name = INFOS[number % 3].id
        one = self.scheduler.pool.workers.get(name)
        offered = [] if one is None else [entry.job.job_id for entry in one.windows[JobKind.BUILD].entries]
        self.world.score(name, "build:unknown", *offered[:: 1 + number % 2], present=number > 20)
        if flag:
            self.scheduler.request_job(name, JobKind.BUILD)

    async def answer(self, number: int, flag: bool) -> None:
        self._collect()
        if self.unanswered:
            name, message = self.unanswered.pop(number % len(self.unanswered))
            self.answered.append((name, message))
            await self._say(name, message, accepted=flag or number % 4 > 0)

    async def answer_again(self, number: int, flag: bool) -> None:
        if self.answered:
            _, message = _pick(self.answered, number)
            if all(message is not one for _, one in self.unanswered):
                await self._say(INFOS[number % 3].id, message, accepted=flag)

    async def stage(self, number: int, flag: bool) -> None:
        if self.store.open:
            self.scheduler.stage(_pick(sorted(self.store.open), number), list(JobStage)[number % 3])

    async def heartbeat(self, number: int, flag: bool) -> None:
        odd = float("nan") if flag else -1.0
        peaks = dict.fromkeys(self.store.open, 30 * number) if number % 3 else None
        free = None if number % 4 == 0 else 1500 * number - 500
        beat = metrics(ram_free_mb=free, cpu_usage_pct=odd, build_peak_ram_mb=peaks, lateness_secs=odd)
        self.scheduler.heartbeat(INFOS[number % 3].id, beat)

    async def drain(self, number: int, flag: bool) -> None:
        (
            self.scheduler.undrain(INFOS[number % 3].id)
            if flag
            else self.scheduler.draining(INFOS[number % 3].id, "t")
        )

    async def change_slots(self, number: int, flag: bool) -> None:
        info = INFOS[number % 3]
        changed = msgspec.structs.replace(info.capabilities, max_concurrent_builds=number % 6)
        self.scheduler.update_capabilities(info.id, changed)

    async def list_again(self, number: int, flag: bool) -> None:
        self.scheduler.request_job_list(INFOS[number % 3].id)

    async def room(self, number: int, flag: bool) -> None:
        outbox = self.world.outboxes[INFOS[number % 3].id]
        outbox.control_has_room = flag

    async def during_the_next_claim(self, number: int, flag: bool) -> None:
        """The world changes between a decision and its commit."""
        name = INFOS[number % 3].id

        def interfere() -> None:
            self.store.before_claim = lambda: None
            self._part(name)
            if number % 4 == 0:
                self.scheduler.worker_disconnected(name)
            elif number % 4 == 1:
                self.world.connect(INFOS[number % 3], self._listed(name))
            elif number % 4 == 2:
                self.scheduler.draining(name, "test")
            else:
                for one, request in self.store.open.items():
                    self.world.bus.publish([AbortWanted(one, request.worker_id, AbortReason.DRAINED, "test")])

        self.store.before_claim = interfere

    # Time

    async def settle(self, number: int, flag: bool) -> None:
        await self.world.settle()

    async def tick(self, number: int, flag: bool) -> None:
        await self.world.tick(5.0 if flag else 31.0)

    # The workers' memory

    def _collect(self) -> None:
        for name, outbox in self.world.outboxes.items():
            self.unanswered += [(name, message) for message in outbox.take(AssignJob)]

    def _part(self, name: str) -> None:
        self._collect()
        self.answered += [one for one in self.unanswered if one[0] == name]
        self.unanswered = [one for one in self.unanswered if one[0] != name]

    def _listed(self, name: str) -> list[AssignedJob]:
        """What a worker lists that got everything that was sent to it. Listing is acceptance."""
        known = self.scheduler.pool.assignments
        mine = {
            one: request
            for one, request in self.store.open.items()
            if request.worker_id == name and known[one].state is not AssignmentState.CLAIMING
        }
        self.store.accepted.update(mine)
        return [
            AssignedJob(assignment_id=one, job_id=request.job_id, kind=self.store.jobs[request.job_id].kind)
            for one, request in mine.items()
        ]

    async def _say(self, name: str, message: AssignJob, *, accepted: bool) -> None:
        response = AssignJobResponse(assignment_id=message.assignment_id, accepted=accepted)
        self.scheduler.answer_arrived(name, response)
        await self.scheduler.assignment_answered(name, response)

    def check(self) -> None:
        self.world.check()
        self._collect()
        for one in self.scheduler.pool:
            for kind in JobKind:
                prefix = kind.value.lower()
                # One that was aborted for its silence is not waited for any more.
                waiting = [
                    message
                    for name, message in self.unanswered
                    if name == one.id
                    and message.job_id.startswith(prefix)
                    and message.assignment_id not in self.store.aborts
                ]
                assert len(waiting) <= 1
                running = [x for x in self.store.open if x in one.assigned and one.assigned[x].kind is kind]
                assert len(running) <= max(one.slots[kind].maximum, one.slots[kind].open)
        for one in self.scheduler.pool:
            if one.draining is not None:
                assert not one.slots[JobKind.BUILD].ready

    async def rest(self) -> None:
        """Everything has settled: what the store knows is what the scheduler knows."""
        for _ in range(2):
            await self.world.tick()
        known = self.scheduler.pool.assignments
        assert set(known) == set(self.store.open)
        for assignment_id, request in self.store.open.items():
            assert (known[assignment_id].job_id, known[assignment_id].worker_id) == (
                request.job_id,
                request.worker_id,
            )
        assert [job_id for job_id in self.store.queued if job_id not in self.scheduler.tracker] == []


def _pick(items: list[T], number: int) -> T:
    return items[number % len(items)]


# As often as they are named here.
STEPS = [
    *["queue"] * 4,
    *["request"] * 6,
    *["score"] * 4,
    *["answer"] * 8,
    *["finish"] * 5,
    *["settle"] * 6,
    *["tick", "queue_again", "unqueue", "another_instance", "connect", "disconnect", "answer_again"],
    *["stage", "heartbeat", "drain", "change_slots", "list_again", "room", "during_the_next_claim"],
]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_the_scheduler_knows_what_the_store_knows(seed: int) -> None:
    # Drawn here and not by hypothesis, whose lists tend to be short and dull; the seed replays it.
    dice = random.Random(seed)

    async def live() -> None:
        life = Life()
        for _ in range(120):
            step, number, flag = dice.choice(STEPS), dice.randrange(24), dice.random() < 0.5
            await getattr(life, step)(number, flag)
            life.check()
        await life.rest()

    trio.run(live)
