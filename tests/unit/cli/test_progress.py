import io
import re

import pytest
from gradient_cli.output import live_text
from gradient_cli.progress import LiveProgress, PlainProgress, State
from rich.console import Console


def snapshot(**builds: str) -> dict:
    return {
        "id": "e1",
        "status": "Building",
        "error": None,
        "builds": [
            {"id": name, "name": name, "status": status, "worker": None} for name, status in builds.items()
        ],
        "notes": [],
    }


def test_counts_follow_the_events() -> None:
    state = State()
    state.apply("snapshot", snapshot(a="Completed", b="Assigned", c="Created"))
    assert state.summary() == "1 of 3 built, 1 running, 1 waiting"
    state.apply(
        "build", {"id": "b", "name": "b", "status": "Failed", "worker": "w", "error": "exit status 1"}
    )
    state.apply(
        "build", {"id": "c", "name": "c", "status": "DependencyFailed", "worker": None, "error": None}
    )
    assert state.summary() == "1 of 3 built, 2 failed"
    assert not state.is_final
    state.apply("evaluation", {"status": "Failed", "error": "2 builds failed"})
    assert state.is_final
    assert state.error == "2 builds failed"


def test_a_stage_belongs_to_its_assignment_alone() -> None:
    state = State()
    state.apply("snapshot", snapshot(a="Assigned"))
    stage = {"id": "a", "name": "a", "worker": "w1", "stage": "Prefetch", "done": 3, "total": 12}
    state.apply("stage", stage)
    assert live_text(state.builds["a"]) == "Prefetch 3 of 12"
    state.apply("build", {"id": "a", "name": "a", "status": "Queued", "worker": None})
    assert live_text(state.builds["a"]) == ""


def evaluating(done: int) -> dict:
    return {"worker": "anvil", "stage": "EvaluatingDerivations", "done": done, "total": 9000}


def test_the_table_shows_how_far_the_evaluation_and_its_builds_are() -> None:
    written, state = io.StringIO(), State()
    with LiveProgress(Console(file=written, width=100, force_terminal=True)) as progress:
        for name, data in (
            ("snapshot", snapshot(a="Assigned") | {"status": "Assigned", "evaluating": evaluating(100)}),
            ("evaluating", evaluating(250)),
            ("stage", {"id": "a", "name": "a", "worker": "w1", "stage": "Upload", "done": 1, "total": 2}),
        ):
            state.apply(name, data)
            progress.show(name, data, state)
    assert "evaluation  EvaluatingDerivations 250 of 9000" in without_escapes(written.getvalue())
    assert "Upload 1 of 2" in without_escapes(written.getvalue())
    state.apply("evaluation", {"status": "Building", "error": None})
    assert state.evaluating is None


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_plain_lines_tell_of_a_long_evaluation_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("gradient_cli.progress.time.monotonic", lambda: now)
    written, state = io.StringIO(), State()
    progress = PlainProgress(Console(file=written, width=80))
    for done in range(0, 5000, 100):
        progress.show("evaluating", evaluating(done), state)
        now += 1
    lines = [line.split("s  ", 1)[1] for line in written.getvalue().splitlines()]
    assert lines == [
        f"evaluation on anvil: EvaluatingDerivations {done} of 9000" for done in range(0, 5000, 1000)
    ]


def test_a_fresh_snapshot_replaces_what_was_known() -> None:
    state = State()
    state.apply("snapshot", snapshot(a="Assigned", b="Created"))
    state.apply("snapshot", snapshot(a="Completed"))
    assert state.counts() == {"Completed": 1}


def test_an_event_of_a_later_server_is_left_alone() -> None:
    state = State()
    state.apply("snapshot", snapshot(a="Created"))
    state.apply("weather", {"sun": True})
    assert state.counts() == {"Created": 1}


def test_plain_lines_show_markup_as_it_is() -> None:
    written = io.StringIO()
    progress = PlainProgress(Console(file=written, width=20))
    state = State()
    data = {
        "id": "a",
        "name": "[bold]lib-1.0[/nope]",
        "status": "Failed",
        "worker": "w",
        "error": "exit status 1",
    }
    state.apply("build", data)
    progress.show("build", data, state)
    assert "[bold]lib-1.0[/nope] Failed: exit status 1 (0 of 1 built, 1 failed)" in written.getvalue()


def test_builds_that_others_had_done_are_counted_in_one_line() -> None:
    written = io.StringIO()
    progress, state = PlainProgress(Console(file=written, width=80)), State()

    def tell(name: str, data: dict) -> None:
        state.apply(name, data)
        progress.show(name, data, state)

    def build(name: str, status: str) -> dict:
        return {"id": name, "name": name, "status": status, "worker": None, "error": None}

    tell("snapshot", snapshot())
    for name in ("done-a", "done-b"):
        tell("build", build(name, "Completed"))
    tell("build", build("new", "Assigned"))
    tell("build", build("new", "Completed"))
    tell("evaluation", {"status": "Completed", "error": None})
    lines = [line.split("s  ", 1)[1] for line in written.getvalue().splitlines()]
    assert lines == [
        "evaluation e1 is Building: 0 of 0 built",
        "new on a worker",
        "new Completed (3 of 3 built)",
        "2 of 3 builds were there already",
        "evaluation Completed",
    ]
