"""Slots, failures, host watch, spans, environment, candidates, race, doctor lines."""

from pathlib import Path

import pytest
import trio
from gradient_protocol.errors import ProtocolError, SessionClosed
from gradient_protocol.kinds import FailureKind, JobKind, SpanKind
from gradient_protocol.limits import MAX_ERROR_TEXT, MAX_SPANS, MAX_WINDOW_CANDIDATES
from gradient_protocol.messages import server, shapes
from gradient_worker.candidates import Candidates
from gradient_worker.executor import failure as failures
from gradient_worker.executor.environment import command_environment
from gradient_worker.executor.host_watch import HostWatch
from gradient_worker.executor.spans import SpanLog
from gradient_worker.race import race
from gradient_worker.runner.layout import ExitReason
from gradient_worker.runner.values import BuildDirectory, BuildExit, RunnerGone
from gradient_worker.scorer import Scorer
from gradient_worker.server_clock import ServerClock
from gradient_worker.slots import Slots
from gradient_worker.stores.directory import DirectoryStore


def test_slots_are_taken_once_and_given_back_once() -> None:
    slots = Slots({JobKind.BUILD: 1, JobKind.EVAL: 0})
    assert slots.take(JobKind.BUILD, "a")
    assert slots.take(JobKind.BUILD, "a")
    assert not slots.take(JobKind.BUILD, "b")
    assert not slots.take(JobKind.EVAL, "b")
    assert slots.give_back("a") is JobKind.BUILD
    assert slots.give_back("a") is None
    assert slots.free(JobKind.BUILD) == 1
    slots.close()
    assert slots.free(JobKind.BUILD) == 0


def test_recovered_jobs_may_exceed_a_lowered_maximum() -> None:
    slots = Slots({JobKind.BUILD: 1})
    slots.adopt(JobKind.BUILD, "a")
    slots.adopt(JobKind.BUILD, "b")
    assert slots.free(JobKind.BUILD) == 0


def ended(**changes: object) -> BuildExit:
    fields: dict[str, object] = {
        "code": 0,
        "signal": None,
        "reason": ExitReason.EXITED,
        "started_at": 0.0,
        "ended_at": 1.0,
        "duration_secs": 1.0,
        "oom_killed": False,
        "host_killed": False,
        "log_bytes": 0,
        "log_discarded_bytes": 0,
    }
    return BuildExit(**{**fields, **changes})  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, None),
        ({"code": 1}, FailureKind.PERMANENT),
        ({"code": None, "signal": 9}, FailureKind.PERMANENT),
        ({"code": None, "signal": 9, "oom_killed": True}, FailureKind.OUT_OF_MEMORY),
        ({"code": 1, "oom_killed": True}, FailureKind.OUT_OF_MEMORY),
        ({"code": None, "signal": 9, "host_killed": True}, FailureKind.TRANSIENT),
        ({"code": None, "signal": 15, "reason": ExitReason.TIMEOUT}, FailureKind.TIMEOUT),
        ({"code": None, "signal": 15, "reason": ExitReason.SILENT}, FailureKind.TIMEOUT),
        ({"code": None, "signal": 15, "reason": ExitReason.KILLED}, FailureKind.TRANSIENT),
        ({"code": None, "reason": ExitReason.RUNNER_ERROR}, FailureKind.TRANSIENT),
        ({"code": None, "reason": ExitReason.RUNNER_DIED}, FailureKind.TRANSIENT),
    ],
)
def test_how_a_command_ended_decides_the_kind(changes: dict[str, object], kind: FailureKind | None) -> None:
    failed = failures.of_exit(ended(**changes), timeout_secs=1, max_silent_secs=1, host_failure=False)
    assert (failed.kind if failed else None) == kind


def test_a_host_failure_is_transient_and_a_success_beside_it_stays_one() -> None:
    killed = ended(code=None, signal=9)
    failed = failures.of_exit(killed, timeout_secs=1, max_silent_secs=1, host_failure=True)
    assert failed is not None
    assert failed.kind is FailureKind.TRANSIENT
    fine = ended(oom_killed=True, host_killed=True)
    assert failures.of_exit(fine, timeout_secs=1, max_silent_secs=1, host_failure=False) is None


def test_errors_of_the_workers_own_are_transient_and_short() -> None:
    group = ExceptionGroup("", [ExceptionGroup("", [RunnerGone("gone")])])
    assert "died" in failures.of_exception(group).error
    assert failures.of_exception(OSError(28, "No space left on device", "/x")).error.endswith("device: /x")
    long = failures.of_exception(ValueError("\N{SNOWMAN}" * MAX_ERROR_TEXT))
    assert len(long.error.encode()) <= MAX_ERROR_TEXT
    assert long.kind is FailureKind.TRANSIENT


def test_builds_that_die_together_are_the_hosts_failure() -> None:
    watch = HostWatch()
    watch.started("a", 0)
    watch.started("b", 0)
    watch.ended("a", 10.0, by_signal=True)
    assert watch.may_be_host("a")
    assert not watch.is_host("a")
    watch.ended("b", 10.9, by_signal=True)
    assert watch.is_host("a")
    assert watch.is_host("b")


@pytest.mark.parametrize(
    ("second_end", "by_signal"), [(11.5, True), (10.5, False), (None, False)], ids=["late", "exit", "runs"]
)
def test_one_that_lives_on_or_ends_by_itself_is_no_host_failure(
    second_end: float | None, by_signal: bool
) -> None:
    watch = HostWatch()
    watch.started("a", 0)
    watch.started("b", 0)
    watch.ended("a", 10.0, by_signal=True)
    if second_end is not None:
        watch.ended("b", second_end, by_signal=by_signal)
    assert not watch.is_host("a")


def test_a_build_alone_is_never_the_hosts_failure() -> None:
    watch = HostWatch()
    watch.started("a", 0)
    watch.ended("a", 10.0, by_signal=True)
    assert not watch.may_be_host("a")
    assert not watch.is_host("a")


def test_spans_beyond_the_limit_are_counted() -> None:
    log = SpanLog(ServerClock(lambda: 1050.0, lambda: 50.0))
    for _ in range(MAX_SPANS):
        assert log.add(SpanKind.BUILD, 10.0) is not None
    assert log.add(SpanKind.BUILD, 10.0) is None
    spans, dropped = log.take()
    assert (len(spans), dropped) == (MAX_SPANS, 1)
    assert spans[0] == shapes.Span(kind=SpanKind.BUILD, start=1010.0, end=1050.0)


def test_a_span_never_ends_before_it_began() -> None:
    log = SpanLog(ServerClock(lambda: 50.0, lambda: 50.0))
    log.add(SpanKind.BUILD, 60.0)
    assert log.take()[0][0].end == 60.0


def test_what_is_learnt_of_the_servers_clock_moves_a_span_and_does_not_stretch_it() -> None:
    clock = ServerClock(lambda: 0.0, lambda: 30.0)
    log = SpanLog(clock)
    log.add(SpanKind.BUILD, 10.0, end=12.0)
    clock.sample(20.0, 20.2, 3620.1)
    ((span,), _) = log.take()
    assert (span.start, span.end) == (pytest.approx(3610.0), pytest.approx(3612.0))


def test_the_environment_of_a_command_is_exactly_this(tmp_path: Path) -> None:
    def one(path: str, name: str | None, output: str | None = None) -> shapes.BuildInput:
        return shapes.BuildInput(path=path, nar_hash="h", nar_size=1, references=[], name=name, output=output)

    build = shapes.BuildJob(
        project="p",
        drv_path="d",
        name="n",
        system="any",
        features=[],
        command=["x"],
        env={"PATH": "/own", "EXTRA": "1"},
        inputs=[
            one("1-lib", "lib-a-1.0", "out"),
            one("2-dev", "lib-a-1.0", "dev"),
            one("3-closure", None),
            one("4-source", "source"),
        ],
        outputs=[
            shapes.DerivationOutput(name="out", path="5-n"),
            shapes.DerivationOutput(name="doc", path="6-n-doc"),
        ],
        timeout_secs=1,
        max_silent_secs=1,
    )
    made = command_environment(
        build, BuildDirectory(Path("/b")), lambda path: Path("/s") / path, tools=Path("/t"), cores=3
    )
    assert made == {
        "out": "/b/outputs/5-n",
        "doc": "/b/outputs/6-n-doc",
        "LIB_A": "/s/1-lib",
        "LIB_A_DEV": "/s/2-dev",
        "SOURCE": "/s/4-source",
        "GRADIENT_CORES": "3",
        "HOME": "/b/home",
        "TMPDIR": "/b/tmp",
        "PATH": "/own",
        "EXTRA": "1",
    }


def candidate(number: int) -> server.Candidate:
    return server.Candidate(job_id=f"j{number}", kind=JobKind.BUILD, required_paths=[], output_paths=[])


def test_a_window_beyond_its_bound_is_the_servers_fault(tmp_path: Path) -> None:
    store = DirectoryStore.open(tmp_path)
    candidates = Candidates(Scorer(store))
    candidates.offer([candidate(number) for number in range(MAX_WINDOW_CANDIDATES)])
    candidates.revoke(["j0"])
    candidates.offer([candidate(0)])
    with pytest.raises(ProtocolError):
        candidates.offer([candidate(-1)])
    store.close()


def test_each_chunk_gets_its_answer(tmp_path: Path) -> None:
    store = DirectoryStore.open(tmp_path)
    candidates = Candidates(Scorer(store))
    candidates.offer([candidate(1)])
    candidates.offer([candidate(2)])
    answers = [candidates.due(), candidates.due(), candidates.due()]
    assert [len(answer.scores) if answer else None for answer in answers] == [2, 0, None]
    store.close()


async def test_a_race_is_won_by_a_result_or_an_error() -> None:
    async def never() -> int:
        await trio.sleep_forever()
        return 0

    async def one() -> int:
        return 1

    async def closed() -> int:
        raise SessionClosed("gone")

    assert await race(never, one) == 1
    with pytest.raises(SessionClosed):
        await race(never, closed)
