import io

from gradient_cli.progress import PlainProgress, State
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
    state.apply("stage", {"id": "a", "name": "a", "worker": "w1", "stage": "Build"})
    assert state.builds["a"]["stage"] == "Build"
    state.apply("build", {"id": "a", "name": "a", "status": "Queued", "worker": None})
    assert state.builds["a"]["stage"] is None


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
