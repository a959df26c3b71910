import io
from pathlib import Path
from typing import Any

import pytest
from gradient_cli import cluster_output, output
from gradient_cli.cluster_commands import print_why_of_job
from gradient_cli.cluster_progress import LiveClusterProgress, PlainClusterProgress
from gradient_cli.clusters import Clusters, exit_code, recipe_at
from gradient_cli.errors import CommandError, ExitCode
from rich.console import Console

Json = dict[str, Any]


def written(directory: Path, text: str) -> Path:
    (directory / "gradient.toml").write_text(text)
    return directory


def recipe(members: int, clusters: int = 1) -> str:
    lines = []
    for cluster in range(clusters):
        lines += ["[[cluster]]", f'name = "c{cluster}"']
        for member in range(members):
            lines += ["[[cluster.member]]", f'build = "b{cluster}-{member}"', 'role = "r"']
    return "\n".join(lines)


def member(index: int, **more: object) -> Json:
    return {
        "job": f"build:{index}",
        "name": f"b-{index}",
        "role": "client",
        "index": index,
        "primary": index == 0,
        "pin": None,
        "status": "Queued",
        "error": None,
        "arrived": True,
        "able": 1,
        "idle": 0,
        "lacking": None,
        "worker": None,
        "seat": None,
        "stage": None,
        **more,
    }


def standing(**more: object) -> Json:
    return {
        "cluster": "id-1",
        "name": "net",
        "project": "default",
        "status": "Queued",
        "stage": "seats",
        "summary": "the pool seats 1 of 2 now, 1 once all are idle",
        "attempts": 0,
        "retry_budget": 1,
        "members": [member(0), member(1)],
        "best_zone": {"zone": None, "seats_idle": 1, "seats_able": 1, "size": 2},
        "reservation": None,
        "reserved_by_other": None,
        "waiting_secs": 3.0,
        "retry_secs": None,
        "expected_start_secs": None,
        "attempt": None,
        "last_failure": None,
        "reason": None,
        **more,
    }


def test_the_members_of_all_clusters_are_asked_for(tmp_path: Path) -> None:
    tree = written(tmp_path, recipe(2, clusters=2))
    assert recipe_at(tree) == (tree, ["b0-0", "b0-1", "b1-0", "b1-1"])
    assert recipe_at(tree / "gradient.toml") == recipe_at(tree)


def test_of_very_many_members_one_of_each_cluster_is_asked_for(tmp_path: Path) -> None:
    _, builds = recipe_at(written(tmp_path, recipe(600, clusters=2)))
    assert builds == ["b0-0", "b1-0"]


@pytest.mark.parametrize(
    "broken", ['cluster = "x"', "[[cluster]]\nmember = 3", "[[cluster]]\n[[cluster.member]]\nbuild = 1"]
)
def test_what_is_wrong_with_a_recipe_is_for_its_evaluation_to_say(tmp_path: Path, broken: str) -> None:
    assert recipe_at(written(tmp_path, broken)) == (tmp_path, [])


@pytest.mark.parametrize(
    ("text", "told"), [("[[build]]", "has no [[cluster]]"), ("[[", "is not TOML"), ("\xff", "is not TOML")]
)
def test_a_file_without_clusters_is_wrong_usage(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "gradient.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(CommandError) as error:
        recipe_at(tmp_path)
    assert told in str(error.value)
    assert error.value.code is ExitCode.USAGE


def test_watching_ends_with_the_last_verdict() -> None:
    state = Clusters()
    state.apply("evaluation", {"id": "e", "status": "Building", "error": None})
    state.apply("cluster", standing(status="Completed"))
    assert not state.is_final, "a cluster may come yet"
    state.apply("cluster", standing(cluster="id-2"))
    state.apply("evaluation", {"id": "e", "status": "Completed", "error": None})
    assert not state.is_final
    state.apply("cluster", standing(cluster="id-2", status="Failed"))
    assert state.is_final


@pytest.mark.parametrize(
    ("evaluation", "clusters", "code"),
    [
        ("Completed", ["Completed", "Completed"], ExitCode.DONE),
        ("Completed", ["Completed", "Aborted"], ExitCode.FAILED),
        ("Failed", ["Completed"], ExitCode.FAILED),
        ("Completed", [], ExitCode.FAILED),
    ],
)
def test_the_exit_code_is_the_verdict(evaluation: str, clusters: list[str], code: ExitCode) -> None:
    ended = {"evaluation": {"status": evaluation}, "clusters": [{"status": one} for one in clusters]}
    assert exit_code(ended) is code


def test_plain_progress_has_a_line_for_what_is_new_and_none_for_the_time() -> None:
    text = io.StringIO()
    progress = PlainClusterProgress(Console(file=text, width=200))
    progress.show("cluster", standing())
    progress.show("cluster", standing(waiting_secs=8.0, summary="the same, five seconds later"))
    assert len(text.getvalue().splitlines()) == 1
    running = [
        member(0, worker="anvil", seat="Running", stage="Build"),
        member(1, worker="bellows", seat="Running"),
    ]
    progress.show("cluster", standing(status="Running", stage="running", attempts=1, members=running))
    progress.show("cluster", standing(status="Running", stage="running", attempts=1, members=running))
    lines = [line.partition("s  ")[2] for line in text.getvalue().splitlines()]
    assert lines == [
        "cluster net Queued: the pool seats 1 of 2 now, 1 once all are idle",
        "cluster net Running, try 1 of 2: the pool seats 1 of 2 now, 1 once all are idle",
        "  net: client 0 on anvil: running, Build",
        "  net: client 1 on bellows: running",
    ]


def test_live_progress_shows_each_member_and_what_it_lacks() -> None:
    text = io.StringIO()
    with LiveClusterProgress(Console(file=text, width=100, force_terminal=True)) as progress:
        progress.show("evaluation", {"id": "e", "status": "Building", "error": None})
        lacking = member(1, lacking="client 1: no worker can take it")
        progress.show("cluster", standing(members=[member(0, worker="anvil", seat="Held"), lacking]))
    shown = text.getvalue()
    assert "evaluation Building" in shown
    assert "anvil" in shown
    assert "client 1: no worker can take it" in shown


def test_why_prints_lacks_seats_and_what_runs_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(cluster_output, "console", Console(file=text, width=200))
    cluster_output.print_cluster_why(
        standing(
            members=[
                member(0),
                member(1, able=0, lacking="client 1: no worker can take it (2 of 2: no kvm)"),
            ],
            reservation={
                "held_secs": 61.2,
                "left_secs": 1738.8,
                "seats": [
                    {"role": "client", "index": 0, "worker": "anvil", "is_idle": False, "running": ["gcc-1"]}
                ],
            },
            expected_start_secs=40.0,
        )
    )
    told = text.getvalue()
    for line in (
        "the pool seats 1 of 2 now, 1 of 2 if every worker were idle",
        "client 0 (b-0): able: 1 worker, 0 of them idle",
        "client 1 (b-1): no worker can take it (2 of 2: no kvm)",
        "its seats are reserved since 61 s, for 1739 s more",
        "client 0 at anvil: runs gcc-1",
        "expected to start in 40 s",
    ):
        assert line in told


def test_why_of_a_member_prints_its_clusters_too_and_of_other_jobs_nothing_of_the_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = io.StringIO()
    for module in (cluster_output, output):
        monkeypatch.setattr(module, "console", Console(file=text, width=200))
    why = {
        "job": "build:1",
        "name": "b-1",
        "status": "Queued",
        "summary": "it starts together with the other members of cluster id-1",
        "reasons": [],
        "workers": [],
        "decision": None,
    }
    print_why_of_job({**why, "cluster": standing()})
    first, *rest = text.getvalue().splitlines()
    assert first == "b-1 (build:1) is Queued: it starts together with the other members of cluster id-1"
    assert rest[0].startswith("net (id-1) is Queued: the pool seats 1 of 2 now")
    assert any("client 1 (b-1)" in line for line in rest)
    text.seek(0)
    text.truncate()
    print_why_of_job({**why, "cluster": None})
    assert text.getvalue().splitlines() == [first]


def test_status_has_a_line_for_each_cluster_that_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=text, width=200))
    output.print_status({"queue": {}, "workers": [], "clusters": [standing()]})
    told = "cluster net (id-1) Queued: the pool seats 1 of 2 now, 1 once all are idle"
    assert text.getvalue().splitlines()[-1] == told
