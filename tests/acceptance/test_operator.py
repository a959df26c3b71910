"""What the commands of an operator say: check, migrate, doctor, benchmark, status."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.pool import Pool, by_name
from tests.acceptance.processes import clean_environment, one_line, program, wait_until
from tests.acceptance.trees import Build


def run(name: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """One command to its end."""
    done = subprocess.run(
        [program(name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment(),
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def findings(done: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    """The word before each subject of the doctor's lines."""
    return {
        subject.strip(): word
        for word, subject in (line.partition(":")[0].split(None, 1) for line in done.stdout.splitlines())
    }


def test_a_database_is_checked_migrated_and_checked_again(tmp_path: Path) -> None:
    base_dir = tmp_path / "base"
    base = ("--base-dir", base_dir)
    missing = run("gradient-server", "check", *base)
    assert missing.returncode == 1
    assert "does not exist" in missing.stdout
    base_dir.mkdir()
    unmigrated = run("gradient-server", "check", *base)
    assert unmigrated.returncode == 1
    assert "run gradient-server migrate" in unmigrated.stdout
    migrated = run("gradient-server", "migrate", *base)
    assert migrated.returncode == 0, migrated.stderr
    assert "migrated from an empty database" in migrated.stdout
    again = run("gradient-server", "migrate", *base)
    assert (again.returncode, "nothing to do" in again.stdout) == (0, True)
    sound = run("gradient-server", "check", *base)
    assert sound.returncode == 0, sound.stdout
    assert sound.stdout == "configuration and database are in order\n"


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text("[proto]\nlisten = 'unix:///x'\nmaxConections = 5\n")
    assert "proto.maxConnections" in one_line(run("gradient-server", "check", "--config", config), 2)
    config.write_text("[worker.build]\nmaxConcurent = 5\n")
    assert "build.maxConcurrent" in one_line(run("gradient-worker", "doctor", "--config", config), 2)


def test_the_benchmark_prints_its_score() -> None:
    done = run("gradient-worker", "benchmark", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["cpu_core_score"] > 0


@pytest.mark.parametrize("connected", [True, False])
def test_the_doctor_finds_a_registered_worker_in_order(pool: Pool, connected: bool) -> None:
    base_dir = pool.workers["host-a"].base_dir
    if not connected:
        line = pool.gradient("worker", "register", "sick").stdout
        pool.write_peers("sick", line)
        base_dir = pool.directory / "sick"
        worker_id = next(w["id"] for w in pool.get("/workers")["workers"] if w["name"] == "sick")
        (base_dir / "worker_id").write_text(f"{worker_id}\n")
    done = run("gradient-worker", "doctor", "--base-dir", base_dir, "--server-url", pool.listen)
    assert done.returncode == 0, done.stdout
    found = findings(done)
    assert {found[subject] for subject in ("store", "disk", "server", "token")} == {"ok"}
    assert found["clock"] == "ok"


def test_the_doctor_says_what_is_wrong_and_what_to_do(pool: Pool) -> None:
    unregistered = run(
        "gradient-worker", "doctor", "--base-dir", pool.directory / "new", "--server-url", pool.listen
    )
    assert unregistered.returncode == 1
    assert findings(unregistered)["token"] == "FAIL"
    assert findings(unregistered)["clock"] == "warn"
    assert "gradient worker register" in unregistered.stdout
    nowhere = run(
        "gradient-worker", "doctor",
        "--base-dir", pool.directory / "new", "--server-url", f"unix://{pool.directory}/nowhere",
    )  # fmt: skip
    assert nowhere.returncode == 1
    assert findings(nowhere)["server"] == "FAIL"


def test_the_status_says_how_far_an_evaluation_is(pool: Pool, tmp_path: Path) -> None:
    go = tmp_path / "go"
    recipe = '[[build]]\\nname = "imported-1.0"\\ncommand = ["/bin/sh", "-c", "echo > $out"]\\n'
    script = f"until test -e {go}; do sleep 0.1; done; mkdir $out; printf '{recipe}' > $out/gradient.toml"
    evaluation = pool.submit(pool.tree(Build("recipes-1.0", script), top='import = ["recipes-1.0"]'))

    def counted() -> list[dict[str, Any]]:
        jobs = [job for worker in pool.get("/status")["workers"] for job in worker["jobs"]]
        return [job for job in jobs if job["job"] == f"eval:{evaluation}" and job["total"] is not None]

    [job] = wait_until("how far it is", counted)
    assert (job["stage"], job["done"], job["total"]) == ("EvaluatingDerivations", 1, 1)
    assert "EvaluatingDerivations 1 of 1" in pool.gradient("status").stdout
    go.touch()
    view = pool.ended(evaluation)
    assert (view["status"], sorted(by_name(view))) == ("Completed", ["imported-1.0", "recipes-1.0"])
