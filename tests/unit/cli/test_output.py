"""What is printed of an evaluation that did not succeed."""

import datetime as dt
from typing import Any

import pytest
from gradient_cli.output import print_evaluation, print_status, print_workers


def build(name: str, status: str, worker: str | None) -> dict[str, Any]:
    return {"id": f"id-{name}", "name": name, "status": status, "worker": worker, "error": None}


def test_only_what_was_started_has_a_log_to_look_at(capsys: pytest.CaptureFixture[str]) -> None:
    builds = [build("ran", "Failed", "host"), build("never", "Aborted", None)]
    for skipped, told in ((1, "1 build not started"), (2, "2 builds not started")):
        waiting = [build(f"w-{number}", "DependencyFailed", None) for number in range(skipped)]
        print_evaluation({"notes": [], "builds": builds + waiting, "outputs": [], "error": None})
        said = capsys.readouterr().out
        assert "its log: gradient logs build:id-ran" in said
        assert "build:id-never" not in said
        assert told in said


def test_one_of_a_thing_is_not_several(capsys: pytest.CaptureFixture[str]) -> None:
    for number, told in ((0, "0 builds, 0 evaluations"), (1, "1 build, 1 evaluation"), (2, "2 builds, 2 ev")):
        print_status({"queue": {"Build": number, "Eval": number}, "workers": [], "clusters": []})
        assert f"waiting: {told}" in capsys.readouterr().out


def test_a_drain_is_shown_with_its_reason_and_its_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    worker = {"name": "anvil", "state": "draining", "slots": {}, "architectures": []}
    print_workers([worker | {"draining_reason": "new disk", "drain_deadline": None}])
    assert "draining (new disk)" in capsys.readouterr().out
    at = dt.datetime(2026, 12, 2, 16, 30).astimezone().timestamp()
    print_workers([worker | {"draining_reason": "new disk", "drain_deadline": at}])
    assert "draining (new disk, until 2026-12-02 16:30:00)" in capsys.readouterr().out
