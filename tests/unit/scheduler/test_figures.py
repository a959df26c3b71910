"""What workers say of themselves, and what the scheduler makes of it: absurd, missing, kept over a loss."""

import math

import pytest
import structlog
from gradient_protocol.kinds import JobKind
from gradient_server.domain.plausible import CAPABILITY_FIGURES, HEARTBEAT_FIGURES
from gradient_server.scheduler.model import AssignedJob, Assignment, AssignmentState
from gradient_server.scheduler.worker import Worker

from tests.fakes.scheduler import RecordingOutbox, World, build, metrics, worker

ABSURD = [math.nan, math.inf, -math.inf, -1.0, 1e18]


@pytest.mark.parametrize("absurd", ABSURD)
def test_absurd_live_figures_are_unknown_or_clamped(absurd: float) -> None:
    one = Worker(worker("a"), RecordingOutbox())
    one.heartbeat(
        metrics(
            ram_free_mb=absurd,
            cpu_usage_pct=absurd,
            upload_speed_mbps=absurd,
            download_speed_mbps=absurd,
            disk_speed_mbps=absurd,
            lateness_secs=absurd,
        )
    )
    seen = one.context.metrics
    assert math.isnan(seen.ram_free_mb) or seen.ram_free_mb == 8000
    assert math.isnan(seen.cpu_usage_pct) or seen.cpu_usage_pct == 100
    for speed in (seen.upload_speed_mbps, seen.download_speed_mbps, seen.disk_speed_mbps):
        assert math.isnan(speed)


@pytest.mark.parametrize("absurd", ABSURD)
def test_no_worker_spoils_the_means_of_the_fleet(absurd: float) -> None:
    world = World()
    world.connect(worker("good", cpu_core_score=2000.0))
    world.connect(worker("bad", cpu_core_score=absurd))
    world.scheduler.heartbeat("good", metrics(upload_speed_mbps=100.0, download_speed_mbps=300.0))
    world.scheduler.heartbeat("bad", metrics(upload_speed_mbps=absurd, download_speed_mbps=absurd))
    instance = world.scheduler.pool.instance(0)
    assert instance.cpu_core_score_mean == 2000.0
    assert (instance.upload_speed_mean_mbps, instance.download_speed_mean_mbps) == (100.0, 300.0)


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -1.0, 1e18])
@pytest.mark.parametrize("name", [*HEARTBEAT_FIGURES, *CAPABILITY_FIGURES])
def test_each_figure_that_cannot_be_true_is_told_once_in_one_line(name: str, absurd: float) -> None:
    world = World()
    with structlog.testing.capture_logs() as logs:
        world.connect(worker("a", **({name: absurd} if name in CAPABILITY_FIGURES else {})))
        for _ in range(3):
            world.scheduler.heartbeat("a", metrics(**({name: absurd} if name in HEARTBEAT_FIGURES else {})))
    [line] = logs
    assert (line["log_level"], line["worker"], list(line["figures"])) == ("warning", "host-a", [name])


def test_what_is_only_unknown_is_no_ones_fault() -> None:
    world = World()
    with structlog.testing.capture_logs() as logs:
        world.connect(worker("a", cpu_core_score=None))
        world.scheduler.heartbeat("a", metrics())
    assert logs == []


async def test_a_host_with_absurd_memory_still_works_and_its_builds_have_no_absurd_peaks() -> None:
    world = World()
    world.connect(worker("a", ram_total_mb=10**18))
    world.scheduler.request_job("a", JobKind.BUILD)
    world.queue(build("x"))
    world.score("a", "build:x", missing=10**18)
    await world.settle()
    [message] = world.assigned("a")
    world.scheduler.heartbeat(
        "a", metrics(ram_free_mb=10**18, build_peak_ram_mb={message.assignment_id: 10**18})
    )
    seen = world.scheduler.pool.workers["a"].context.metrics
    assert math.isnan(seen.ram_total_mb)
    assert math.isnan(seen.ram_free_mb)
    # No total is known that could bound it: what no host has is no figure.
    assert world.scheduler.observed_peaks_mb("a") == {}


async def test_a_build_is_assigned_where_nothing_at_all_is_known() -> None:
    """No heartbeat yet, no history, no windows, no core score; nor has the worker scored it."""
    world = World()
    world.connect(worker("a", cpu_core_score=None, ram_total_mb=0))
    world.scheduler.request_job("a", JobKind.BUILD)
    world.queue(build("x"))
    for _ in range(4):
        assert world.assigned("a") == []
        await world.tick()
    assert [one.job_id for one in world.assigned("a")] == ["build:x"]
    [claim] = world.store.claims
    assert (claim.missing_count, claim.missing_nar_size) == (None, None)


async def test_what_a_build_was_seen_with_is_known_after_its_session_and_no_more_than_the_host() -> None:
    world = World()
    world.connect(worker("a"))
    for name in ("x", "y"):
        world.scheduler.request_job("a", JobKind.BUILD)
        world.queue(build(name))
        world.score("a", f"build:{name}")
        await world.settle()
        [message] = world.assigned("a")
        await world.answer("a", message)
    x, y = world.scheduler.pool.of_worker("a")
    peaks = {x.assignment_id: 700, y.assignment_id: 10**18}
    world.scheduler.heartbeat("a", metrics(build_peak_ram_mb=peaks))
    world.scheduler.heartbeat("a", metrics(build_peak_ram_mb={}))
    world.scheduler.worker_disconnected("a")
    assert world.scheduler.observed_peaks_mb("a") == {x.assignment_id: 700, y.assignment_id: 8000}


@pytest.mark.parametrize(("told", "reserved"), [(750.0, 750.0), (None, 1024.0)])
def test_an_adopted_build_reserves_what_is_known_of_it(told: float | None, reserved: float) -> None:
    world = World()
    adopted = AssignedJob(assignment_id="one", job_id="build:x", kind=JobKind.BUILD, ram_reserved_mb=told)
    evaluating = AssignedJob(assignment_id="two", job_id="eval:y", kind=JobKind.EVAL)
    world.connect(worker("a"), [adopted, evaluating])
    assert world.scheduler.pool.workers["a"].context.metrics.ram_reserved_mb == reserved


async def test_eight_builds_that_are_asked_for_within_one_heartbeat_are_kept_apart_by_what_is_booked() -> (
    None
):
    """The heartbeat still says that all memory is free (real processes: acceptance/test_memory.py)."""
    world = World()
    world.connect(worker("a", ram_total_mb=2560, max_concurrent_builds=8))
    world.scheduler.heartbeat("a", metrics(ram_free_mb=2560.0, build_peak_ram_mb={}))
    jobs = [build(f"eater-{number}", peak_ram_mb=612) for number in range(8)]
    world.queue(*jobs)
    world.score("a", *(job.job_id for job in jobs))
    taken = 0
    for _ in range(9):
        world.scheduler.request_job("a", JobKind.BUILD)
        await world.settle()
        for message in world.assigned("a"):
            taken += 1
            await world.answer("a", message)
    # 2560 - 3 * 612 is 724, and 674 are needed to start.
    assert taken == 4


async def test_a_members_seat_reserves_its_memory() -> None:
    world = World()
    world.connect(worker("a"))
    world.scheduler.request_job("a", JobKind.BUILD)
    job = build("member", cluster="c", peak_ram_mb=900)
    world.queue(job)
    seat = Assignment(
        assignment_id="one",
        job_id=job.job_id,
        kind=job.kind,
        name=job.name,
        worker_id="a",
        worker_name="host-a",
        state=AssignmentState.CLAIMING,
        assigned_at=world.clock.monotonic(),
        job=job,
        cluster_attempt="attempt",
    )
    assert world.scheduler.take_seats([seat])
    assert world.scheduler.pool.workers["a"].context.metrics.ram_reserved_mb == 900.0
    world.check()
