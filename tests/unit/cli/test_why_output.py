"""What `gradient why` prints of a decision."""

import io

import pytest
from gradient_cli import output
from rich.console import Console

DECISION = {
    "worker": "w1",
    "total": 8660.0,
    "rules": {"EstimatedTimeRule": 3600.0, "QosRule": 5060.0},
    "runner_up": {
        "job": "build:2",
        "name": "second-1",
        "total": 3600.0,
        "rules": {"EstimatedTimeRule": 3600.0, "QosRule": 0.0},
    },
}


def printed(monkeypatch: pytest.MonkeyPatch, decision: dict[str, object]) -> list[list[str]]:
    text = io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=text, width=200))
    output.print_decision(decision)
    return [line.split() for line in text.getvalue().splitlines()]


def test_each_rule_stands_beside_that_of_the_next_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, DECISION)
    assert ["RULE", "POINTS", "NEXT", "IN", "LINE"] in lines
    assert ["QosRule", "5060.0", "0.0"] in lines
    assert " ".join(lines[-1]) == "the next in line was second-1 with 3600.0 points"


def test_without_one_to_show_the_points_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, {**DECISION, "runner_up": None})
    assert ["QosRule", "5060.0"] in lines
    assert not any("NEXT" in line for line in lines)
