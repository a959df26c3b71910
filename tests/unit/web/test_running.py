from dataclasses import replace

from gradient_protocol.kinds import JobKind, JobStage
from gradient_server.domain.events import BuildChanged
from gradient_server.scheduler.model import Assignment, AssignmentState
from gradient_server.web.live import Live
from gradient_server.web.running import Running, Told


def assignment(
    name: str = "a1", *, state: AssignmentState = AssignmentState.SENT, stage: JobStage | None = None
) -> Assignment:
    return Assignment(
        assignment_id=name,
        job_id="build:b",
        kind=JobKind.BUILD,
        name="b-1",
        worker_id="w",
        worker_name="host",
        state=state,
        assigned_at=0.0,
        stage=stage,
    )


JOBS = {"build:b": "b-1"}


def look(
    running: Running,
    *assignments: Assignment,
    jobs: dict[str, str] = JOBS,
    live: Live | None = None,
) -> list[Told]:
    """`live`: how far they all are; else in their stage, which counts nothing."""

    def live_of(one: Assignment) -> Live:
        return live or Live(None if one.stage is None else str(one.stage))

    return list(running.look(jobs, {one.job_id: one for one in assignments}, live_of))


def build(status: str, worker: str | None, attr: str | None = None) -> Told:
    data = {"id": "b", "name": "b-1", "attr": attr, "status": status, "worker": worker, "error": None}
    return "build", data


def stage(name: str, done: int | None = None, total: int | None = None) -> Told:
    return "stage", {
        "id": "b", "name": "b-1", "worker": "host", "stage": name, "done": done, "total": total
    }  # fmt: skip


STAGE = stage("Build")


def test_a_build_that_runs_is_told_once_and_each_stage_once() -> None:
    running = Running()
    running.attrs["build:b"] = "b"
    assert look(running, assignment(state=AssignmentState.CLAIMING)) == []
    assert look(running, assignment()) == [build("Assigned", "host", "b")]
    assert look(running, assignment()) == []
    assert look(running, assignment(stage=JobStage.BUILD)) == [STAGE]
    assert look(running, assignment(stage=JobStage.BUILD)) == []


def test_progress_is_told_when_it_changes() -> None:
    running = Running()
    look(running, assignment())
    assert look(running, assignment(), live=Live("Prefetch", 1, 3)) == [stage("Prefetch", 1, 3)]
    assert look(running, assignment(), live=Live("Prefetch", 1, 3)) == []
    assert look(running, assignment(), live=Live("Prefetch", 2, 3)) == [stage("Prefetch", 2, 3)]


def test_the_evaluation_itself_is_told_apart_from_its_builds() -> None:
    running, jobs = Running(), {"eval:e": "evaluation"}
    one = replace(assignment(), job_id="eval:e", kind=JobKind.EVAL)
    assert look(running, one, jobs=jobs) == []
    live = Live("EvaluatingDerivations", 5, 9)
    told = {"worker": "host", "stage": "EvaluatingDerivations", "done": 5, "total": 9}
    assert look(running, one, jobs=jobs, live=live) == [("evaluating", told)]
    # Its status says what became of it.
    assert look(running, jobs=jobs) == []


def test_builds_of_others_are_not_told() -> None:
    assert look(Running(), assignment(), jobs={}) == []


def test_a_build_that_was_given_back_waits_again() -> None:
    running = Running()
    look(running, assignment())
    assert look(running) == [build("Queued", None)]
    assert look(running) == []
    assert look(running, assignment("a2")) == [build("Assigned", "host")]


def test_a_build_that_went_straight_to_another_worker_is_told_again() -> None:
    running = Running()
    look(running, assignment("a1"))
    assert look(running, assignment("a2")) == [build("Assigned", "host")]


def test_a_build_whose_end_was_told_is_not_said_to_wait() -> None:
    running = Running()
    look(running, assignment(stage=JobStage.BUILD))
    running.changed("build:b", BuildChanged("b", ("e",), "b-1", "Completed"))
    assert look(running) == []


def test_what_the_snapshot_said_is_not_told_again() -> None:
    running = Running()
    running.told("build:b", assignment(stage=JobStage.BUILD), Live("Build"))
    assert look(running, assignment(stage=JobStage.BUILD)) == []
