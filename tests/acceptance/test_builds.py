"""What `gradient build` can be asked for: aborts, imports, Git sources, features, projects, huge logs."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.pool import Pool, by_name
from tests.acceptance.processes import is_alive, one_line, wait_until
from tests.acceptance.trees import Build

SOON_SECS = 1.0
BIG_LINE = 100 * 1024 * 1024


def first_connected(pool: Pool, name: str) -> float:
    """When the worker was seen connected, in wall time."""

    def connected() -> bool:
        return any(w["name"] == name and w["state"] == "connected" for w in pool.get("/workers")["workers"])

    wait_until(f"{name} connected", connected)
    return time.time()


def accepted_at(pool: Pool, job: str) -> float:
    """When a worker took the job, in wall time."""

    def accepted() -> float | None:
        attempts = pool.get(f"/jobs/{job}")["attempts"]
        found: float | None = attempts[-1]["accepted_at"] if attempts else None
        return found

    return wait_until(f"a worker for {job}", accepted)


def building(pool: Pool, evaluation: str) -> dict[str, Any]:
    """The evaluation once its graph is known."""

    def known() -> dict[str, Any] | None:
        view = pool.evaluation(evaluation)
        assert view["status"] not in ("Failed", "Aborted"), view
        return view if view["status"] == "Building" else None

    return wait_until("the graph", known)


def test_a_feature_that_no_worker_has_waits_for_one(pool: Pool) -> None:
    evaluation = pool.submit(pool.tree(Build("special-1.0", more={"features": ["rare-device"]})))
    build = by_name(building(pool, evaluation))["special-1.0"]
    assert build["status"] == "Queued"
    told = pool.gradient("why", f"build:{build['id']}")
    assert told.returncode == 0
    assert "the one connected worker cannot take it: it " in told.stdout
    assert "rare-device" in told.stdout
    pool.start_worker("host-rare", "--system-features", "rare-device", wait=False)
    connected = first_connected(pool, "host-rare")
    assert accepted_at(pool, f"build:{build['id']}") - connected < SOON_SECS
    view = pool.ended(evaluation)
    assert view["status"] == "Completed"
    assert by_name(view)["special-1.0"]["worker"] == "host-rare"
    pool.stop_worker("host-rare")


def test_detach_prints_the_id_alone_and_json_the_whole_answer(pool: Pool) -> None:
    tree = pool.tree(Build("quick-1.0"))
    done = pool.gradient("build", tree, "--detach")
    assert done.returncode == 0
    evaluation = done.stdout.strip()
    assert pool.ended(evaluation)["status"] == "Completed"
    view = pool.gradient_json("build", tree)
    assert view["status"] == "Completed"
    assert view["outputs"][0]["path"].endswith("-quick-1.0")
    job = pool.gradient_json("show", f"build:{view['builds'][0]['id']}")
    assert evaluation in job["evaluations"]
    assert len(job["attempts"]) == 1, "the second submission built it again"
    assert pool.gradient_json("status")["workers"][0]["name"] == "host-a"


def test_an_import_is_built_and_read_as_further_recipes(pool: Pool) -> None:
    inner = '[[build]]\nname = "imported-1.0"\ncommand = ["/bin/sh", "-c", "cat $SOURCE/text > $out"]\n'
    generator = Build(
        "gen-1.0",
        f"mkdir $out; echo from the import > $out/text; cat > $out/gradient.toml <<'END'\n"
        f'{inner}inputs = ["source"]\nEND\n',
    )
    view = pool.gradient_json("build", pool.tree(generator, top='import = ["gen-1.0"]'))
    assert {name: build["status"] for name, build in by_name(view).items()} == {
        "gen-1.0": "Completed",
        "imported-1.0": "Completed",
    }
    output = next(out["path"] for out in view["outputs"] if out["name"] == "imported-1.0")
    assert (pool.workers["host-a"].store / output).read_text() == "from the import\n"


def test_a_git_source_is_the_same_source_as_the_uploaded_tree(pool: Pool) -> None:
    tree = pool.tree(Build("cloned-1.0", "cp $SOURCE/content $out", inputs=["source"]))
    (tree / "content").write_text("tracked\n")
    git = ["git", "-C", str(tree), "-c", "user.name=T", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "content"]):
        subprocess.run([*git, *arguments], check=True)
    answer = pool.post("/evaluations", {"source": {"type": "Git", "url": f"file://{tree}"}})
    cloned = pool.ended(answer["evaluation"])
    assert cloned["status"] == "Completed", cloned
    uploaded = pool.gradient_json("build", tree)
    assert uploaded["source_path"] == cloned["source_path"]
    assert [out["path"] for out in uploaded["outputs"]] == [out["path"] for out in cloned["outputs"]]
    assert uploaded["builds"][0]["id"] == cloned["builds"][0]["id"]


def test_a_worker_of_one_project_serves_that_project_alone(pool: Pool) -> None:
    assert pool.gradient("project", "create", "lab").returncode == 0
    registered = pool.gradient_json("worker", "register", "host-lab", "--project", "lab")
    pool.write_peers("host-lab", registered["peers_line"] + "\n")
    (pool.directory / "host-lab/worker_id").write_text(registered["worker_id"] + "\n")
    pool.start_worker("host-lab", "--system-features", "lab-bench", register=False)
    evaluation = pool.submit(pool.tree(Build("foreign-1.0", more={"features": ["lab-bench"]})))
    build = by_name(building(pool, evaluation))["foreign-1.0"]
    told = pool.gradient("why", f"build:{build['id']}")
    assert "host-lab: ineligible" in told.stdout
    assert "project" in told.stdout
    tree = pool.tree(Build("own-1.0", more={"features": ["lab-bench"]}))
    own = pool.gradient_json("build", tree, "--project", "lab")
    assert by_name(own)["own-1.0"]["worker"] == "host-lab"
    assert by_name(pool.evaluation(evaluation))["foreign-1.0"]["status"] == "Queued"
    assert pool.gradient("abort", f"eval:{evaluation}").returncode == 0
    pool.stop_worker("host-lab")


def test_100_mib_in_one_line_neither_stop_the_build_nor_an_abort_beside_it(pool: Pool) -> None:
    sleeping = pool.submit(pool.tree(Build("sleeper-1.0", "echo sleeping; sleep 3000")))
    sleeper = pool.running(sleeping, "sleeper-1.0")
    script = f"head -c {BIG_LINE} /dev/zero | tr '\\0' x; sleep 4; echo; echo the end; echo > $out"
    noisy = pool.submit(pool.tree(Build("noise-1.0", script)))
    noise = pool.running(noisy, "noise-1.0")
    assert pool.gradient("abort", f"build:{sleeper['id']}").returncode == 0
    aborted = by_name(pool.ended(sleeping))["sleeper-1.0"]
    assert aborted["status"] == "Aborted"
    view = pool.ended(noisy)
    assert view["status"] == "Completed"
    assert aborted["finished_at"] < by_name(view)["noise-1.0"]["finished_at"], "the abort waited for the log"
    host = next(w for w in pool.get("/workers")["workers"] if w["name"] == "host-a")
    assert time.time() - host["last_seen_at"] < 20, "heartbeats stopped"
    attempts = pool.get(f"/jobs/build:{noise['id']}")["attempts"]
    assert len(attempts) == 1
    log = pool.log_of(f"build:{noise['id']}")
    assert len(log) == attempts[0]["log_bytes"] < BIG_LINE / 4
    assert b"bytes of output left out, over the worker's log limits]" in log
    assert log.endswith(b"\nthe end\n")


def test_an_aborted_evaluation_takes_its_running_build_along(pool: Pool, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    tree = pool.tree(
        Build("aborted-1.0", f"echo $$ > {pids}; sleep 3000"), Build("after-1.0", inputs=["aborted-1.0"])
    )
    evaluation = pool.submit(tree)
    build = pool.running(evaluation, "aborted-1.0")
    wait_until("the build's pid", lambda: pids.exists() and pids.read_text())
    assert pool.gradient("abort", f"eval:{evaluation}").returncode == 0
    assert pool.ended(evaluation)["status"] == "Aborted"
    pid = int(pids.read_text())
    wait_until("the end of its process", lambda: not is_alive(pid), secs=20)
    wait_until("its report", lambda: pool.get(f"/jobs/build:{build['id']}")["status"] == "Aborted")
    again = pool.submit(tree)
    assert pool.running(again, "aborted-1.0")["id"] != build["id"], "asking again builds again"
    assert pool.gradient("abort", again).returncode == 0
    assert pool.ended(again)["status"] == "Aborted"


@pytest.mark.slow
def test_10_000_builds_in_one_file_are_evaluated_and_aborted(pool: Pool) -> None:
    tree = pool.tree(
        *(Build(f"one-of-many-{number}", more={"features": ["nobody"]}) for number in range(10_000))
    )
    evaluation = pool.submit(tree)

    def counted() -> bool:
        entries = pool.get("/evaluations?limit=1")["evaluations"]
        assert entries[0]["id"] == evaluation
        assert entries[0]["status"] not in ("Failed", "Aborted"), entries
        return bool(entries[0]["status"] == "Building" and entries[0]["counts"] == {"Queued": 10_000})

    wait_until("the graph of 10,000 builds", counted, secs=60)
    began = time.monotonic()
    assert pool.gradient("abort", f"eval:{evaluation}").returncode == 0
    assert pool.get("/evaluations?limit=1")["evaluations"][0]["status"] == "Aborted"
    assert time.monotonic() - began < 15


def test_a_server_that_is_not_there(pool: Pool) -> None:
    done = pool.gradient("status", GRADIENT_URL="http://127.0.0.1:1")
    assert "start gradient-server, or set GRADIENT_URL" in one_line(done, 3)
