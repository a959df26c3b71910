"""A simulated day: the real scheduler under a virtual clock, between simulated hosts and a fake database.

Events are a heap of (seconds, what happens). After each, everything that follows at once is let happen:
claims, loaded histories, offers and their scores, assignments and their answers. The tick of 5 s, the
heartbeat of 10 s and the instance's windows are events too.

A build that the kernel kills is tried once more with its peak on record, as the server does it; after the
second kill it has failed.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind, JobStage
from gradient_protocol.messages.server import AssignJob, Candidate
from gradient_protocol.messages.worker import AssignJobResponse, CandidateScore, CandidateScores
from gradient_server.domain.events import Bus, JobQueued
from gradient_server.domain.job import PendingJob
from gradient_server.history.book import HistoryBook, HistoryKey, history_key
from gradient_server.history.prediction import HISTORY_ROWS, MetricRow, predict
from gradient_server.scheduler.model import SchedulerSettings
from gradient_server.scheduler.scheduler import Scheduler
from gradient_server.scoring.contexts import InstanceContext, Windowed
from gradient_server.scoring.policy import ScoringPolicy

from bench.day_hosts import CORE_SCORE, PEAK_AFTER, Run, SimHost
from bench.day_load import Host, JobClass, SimJob
from tests.fakes.scheduler import START, FakeClaimStore, RecordingOutbox, SteppedClock, build, evaluation

__all__ = ["Day", "Outcome", "simulate"]

_TICK_SECS: Final = 5.0
_HEARTBEAT_TICKS: Final = 2
_WINDOWS_TICKS: Final = 12
_MAX_DAYS: Final = 4.0
_TRIES: Final = 2


@dataclass(slots=True)
class Outcome:
    """How one job went. `wait_secs`: from being ready to the start of its last try."""

    job: SimJob
    wait_secs: float
    kills: int
    failed: bool


@dataclass(slots=True)
class _Mean:
    """Values of the last hour."""

    values: deque[tuple[float, float]] = field(default_factory=deque)
    total: float = 0.0

    def add(self, at: float, value: float) -> None:
        self.values.append((at, value))
        self.total += value

    def since(self, at: float) -> Windowed:
        while self.values and self.values[0][0] < at:
            self.total -= self.values.popleft()[1]
        return Windowed(w1h=self.total / len(self.values)) if self.values else Windowed()


class Day:
    """One policy's day."""

    def __init__(self, jobs: list[SimJob], specs: list[Host], policy: ScoringPolicy) -> None:
        self.clock = SteppedClock()
        self.store = FakeClaimStore()
        self.bus = Bus()
        self.book = HistoryBook()
        self.scheduler = Scheduler(
            store=self.store,
            bus=self.bus,
            clock=self.clock,
            ids=IdSource.seeded(1, self.clock.now),
            settings=SchedulerSettings(),
            policy=policy,
            histories=self.book,
        )
        self.hosts = {spec.name: SimHost(spec) for spec in specs}
        self.outboxes = {name: RecordingOutbox() for name in self.hosts}
        self.outcomes: list[Outcome] = []
        self._jobs = {self._job_id(job): job for job in jobs}
        self._kills: dict[str, int] = {}
        self._rows: dict[HistoryKey, deque[MetricRow]] = {}
        self._waits, self._peaks, self._times = _Mean(), _Mean(), _Mean()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._remember_yesterday(jobs)
        for job in jobs:
            self._at(job.arrives_secs, lambda job=job: self._arrive(job))

    # The clock

    def _at(self, secs: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (secs, next(self._order), happens))

    async def run(self, check: Callable[["Day"], None] = lambda _: None) -> None:
        """The whole day, and what is left of it afterwards. `check` is called after each tick."""
        for name, host in self.hosts.items():
            self.scheduler.worker_connected(host.info, self.outboxes[name], ())
            self._ask(host)
        limit = _MAX_DAYS * max(self._events)[0]
        ticks = 0
        while len(self.outcomes) < len(self._jobs):
            ticks += 1
            await self._until(ticks * _TICK_SECS)
            if ticks % _HEARTBEAT_TICKS == 0:
                self._heartbeats()
            if ticks % _WINDOWS_TICKS == 0:
                self.scheduler.set_windows(self._windows())
            self.book.want_outdated()
            await self.scheduler.loops.tick()
            await self._settle()
            check(self)
            if ticks * _TICK_SECS > limit:
                raise RuntimeError(f"{len(self._jobs) - len(self.outcomes)} jobs never started or ended")

    async def _until(self, secs: float) -> None:
        while self._events and self._events[0][0] <= secs:
            self.clock.passed, _, happens = heapq.heappop(self._events)
            happens()
            await self._settle()
        self.clock.passed = secs

    async def _settle(self) -> None:
        scheduler, dispatcher, loops = self.scheduler, self.scheduler.dispatcher, self.scheduler.loops
        busy = True
        while busy:
            busy = False
            while dispatcher.has_claims or loops.has_look_ups:
                await dispatcher.claim_batch()
                await loops.look_up_batch()
            self._load_histories()
            scheduler.offers.flush(scheduler.offers.urgent)
            scheduler.offers.flush(scheduler.offers.gathered)
            for name, outbox in self.outboxes.items():
                if outbox.sent:
                    busy = True
                    await self._read(self.hosts[name], outbox)

    # The server's part

    @staticmethod
    def _job_id(job: SimJob) -> str:
        return f"{'eval' if job.kind is JobClass.EVALUATION else 'build'}:{job.number:06}"

    def _arrive(self, job: SimJob) -> None:
        ready_at = START + job.arrives_secs
        if job.kind is JobClass.EVALUATION:
            pending = evaluation(f"{job.number:06}", queued_at=ready_at, ready_at=ready_at, task=job.name)
        else:
            pending = build(
                f"{job.number:06}",
                queued_at=ready_at,
                ready_at=ready_at,
                pname=job.name,
                prioritized=job.kind is JobClass.PRIORITISED,
                build_request=job.kind is JobClass.BUILD_REQUEST,
            )
        self._queue(pending)

    def _queue(self, job: PendingJob) -> None:
        self.store.queued[job.job_id] = job
        self.bus.publish([JobQueued(job)])

    def _remember_yesterday(self, jobs: list[SimJob]) -> None:
        """Nine names in ten were built before the day, on a core of 3000 points with nothing beside."""
        for job in {job.name: job for job in reversed(jobs) if not job.is_new_name}.values():
            row = MetricRow(
                derivation=-1,
                oom_killed=False,
                concurrent_builds=0,
                peak_ram_mb=job.peak_mb,
                build_time_ms=round(job.run_secs * 1000.0),
                cpu_core_score=CORE_SCORE,
            )
            key = HistoryKey(JobKind.BUILD, job.name, "any")
            self._rows[key] = deque([row], maxlen=HISTORY_ROWS)

    def _load_histories(self) -> None:
        while wanted := self.book.take_wanted(256):
            loaded = {key: predict([*self._rows.get(key, ())], {}) for key in wanted}
            for job_id, prediction in self.book.put(loaded):
                self.scheduler.set_history(job_id, prediction)

    def _windows(self) -> InstanceContext:
        hour_ago = self.clock.passed - 3600.0
        return InstanceContext(
            wait_secs=self._waits.since(hour_ago),
            peak_ram_mb=self._peaks.since(hour_ago),
            build_time_ms=self._times.since(hour_ago),
        )

    # The hosts' part

    def _ask(self, host: SimHost) -> None:
        for kind in JobKind:
            if host.slot_free(kind):
                self.scheduler.request_job(host.spec.name, kind)

    def _heartbeats(self) -> None:
        for name, host in self.hosts.items():
            if host.runs or not host.is_told:
                self.scheduler.heartbeat(name, host.heartbeat())
                host.is_told = not host.runs

    async def _read(self, host: SimHost, outbox: RecordingOutbox) -> None:
        sent, outbox.sent = outbox.sent, []
        scores: list[CandidateScore] = []
        for message in sent:
            if isinstance(message, AssignJob):
                await self._begin(host, message)
                continue
            for raw in getattr(message, "candidates", ()):
                job_id = msgspec.msgpack.decode(msgspec.Raw(raw), type=Candidate).job_id
                missing = host.missing_bytes(self._jobs[job_id])
                scores.append(
                    CandidateScore(
                        job_id=job_id,
                        missing_count=missing >> 22,
                        missing_nar_size=missing,
                        outputs_present=False,
                    )
                )
        if scores:
            self.scheduler.candidate_scores(host.spec.name, CandidateScores(scores=scores, is_final=True))

    async def _begin(self, host: SimHost, message: AssignJob) -> None:
        job, now = self._jobs[message.job_id], self.clock.passed
        run = Run(job, message.assignment_id, host, now, beside=host.builds_at())
        host.runs[run.assignment_id] = run
        answer = AssignJobResponse(assignment_id=run.assignment_id, accepted=True)
        self.scheduler.answer_arrived(host.spec.name, answer)
        await self.scheduler.assignment_answered(host.spec.name, answer)
        self._ask(host)
        if job.kind is JobClass.EVALUATION:
            self._at(now + host.run_secs(run), lambda: self._end(run))
            return
        self._waits.add(now, now - job.arrives_secs)
        self.scheduler.stage(run.assignment_id, JobStage.PREFETCH)
        self._at(now + host.fetch_secs(job), lambda: self._build(run))

    def _build(self, run: Run) -> None:
        if run.over:
            return
        run.build_secs, now = run.host.run_secs(run), self.clock.passed
        self.scheduler.stage(run.assignment_id, JobStage.BUILD)
        self._at(now + run.build_secs * PEAK_AFTER, lambda: self._peak(run))
        self._at(now + run.build_secs, lambda: self._upload(run))
        self._kill_for_memory(run.host)

    def _peak(self, run: Run) -> None:
        if run.over:
            return
        run.at_peak = True
        self._kill_for_memory(run.host)

    def _kill_for_memory(self, host: SimHost) -> None:
        while (victim := host.victim()) is not None:
            self._kill(victim)

    def _upload(self, run: Run) -> None:
        if not run.over:
            self.scheduler.stage(run.assignment_id, JobStage.UPLOAD)
            self._at(self.clock.passed + run.host.upload_secs(run.job), lambda: self._end(run))

    def _leave(self, run: Run, *, killed: bool) -> PendingJob:
        """The run is over, and its assignment closed."""
        run.over = True
        del run.host.runs[run.assignment_id]
        pending = self.store.jobs[self.store.open[run.assignment_id].job_id]
        if run.job.kind is not JobClass.EVALUATION:
            self._measure(run, history_key(pending), killed=killed)
        self.bus.publish(self.store.close(run.assignment_id))
        return pending

    def _measure(self, run: Run, key: HistoryKey, *, killed: bool) -> None:
        row = MetricRow(
            derivation=run.job.number,
            oom_killed=killed,
            concurrent_builds=run.beside,
            peak_ram_mb=run.job.peak_mb,
            build_time_ms=None if killed else round(run.build_secs * 1000.0),
            cpu_core_score=run.host.spec.core_score,
        )
        self._rows.setdefault(key, deque(maxlen=HISTORY_ROWS)).append(row)
        now = self.clock.passed
        self._peaks.add(now, run.job.peak_mb)
        if not killed:
            self._times.add(now, run.build_secs * 1000.0)

    def _end(self, run: Run) -> None:
        self._leave(run, killed=False)
        self._finish(run, failed=False)
        self._ask(run.host)

    def _kill(self, run: Run) -> None:
        job_id = self._job_id(run.job)
        self._kills[job_id] = self._kills.get(job_id, 0) + 1
        pending = self._leave(run, killed=True)
        if self._kills[job_id] < _TRIES:
            peak_mb = run.job.peak_mb
            self._queue(replace(pending, peak_ram_mb=peak_mb, needs_ram_over_mb=peak_mb))
        else:
            self._finish(run, failed=True)
        self._ask(run.host)

    def _finish(self, run: Run, *, failed: bool) -> None:
        kills = self._kills.get(self._job_id(run.job), 0)
        self.outcomes.append(Outcome(run.job, run.began_at - run.job.arrives_secs, kills, failed))


async def simulate(jobs: list[SimJob], specs: list[Host], policy: ScoringPolicy) -> Day:
    """A policy's day, from its first job to its last."""
    day = Day(jobs, specs, policy)
    await day.run()
    return day
