"""How builds end: one evaluation with one build of each kind, built once and looked at from all sides."""

import subprocess
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.acceptance.pool import Pool, by_name
from tests.acceptance.processes import is_alive
from tests.acceptance.trees import Build

GRANDCHILDREN = """
setsid sleep 3170 </dev/null >/dev/null 2>&1 & echo $!
sleep 3171 & echo $!
echo done > $out
"""


@dataclass(frozen=True)
class Endings:
    """What `gradient build` answered, and the evaluation."""

    done: "subprocess.CompletedProcess[str]"
    view: dict[str, Any]

    def build(self, name: str) -> dict[str, Any]:
        """One of its builds."""
        return by_name(self.view)[name]


@pytest.fixture(scope="module")
def endings(pool: Pool) -> Endings:
    tree = pool.tree(
        Build("sound-1.0"),
        Build("binary-1.0", r"printf '\000\377\376\r\n\033[31m\200'; echo > $out"),
        Build("grandchild-1.0", GRANDCHILDREN),
        Build("failing-1.0", "echo to say; echo to complain >&2; exit 7"),
        Build("dependent-1.0", inputs=["failing-1.0"]),
        Build("absent-1.0", "echo nothing made"),
        Build("silent-1.0", "echo then nothing; sleep 300", more={"max_silent": 1}),
        Build("endless-1.0", "while :; do echo more; sleep 0.1; done", more={"timeout": 2}),
        Build("unknown-1.0", more={"command": ["/no/such/program"]}),
    )
    done = pool.gradient("build", tree)
    newest = pool.get("/evaluations?limit=1")["evaluations"][0]["id"]
    return Endings(done, pool.evaluation(newest))


def test_a_failed_evaluation_exits_with_1_and_says_where_the_logs_are(endings: Endings) -> None:
    assert endings.done.returncode == 1
    assert endings.view["status"] == "Failed"
    assert "failing-1.0 failed: the command ended with exit status 7" in endings.done.stdout
    assert f"gradient logs build:{endings.build('failing-1.0')['id']}" in endings.done.stdout
    assert "1 build not started, for something needed failed" in endings.done.stdout


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("sound-1.0", "Completed", None),
        ("binary-1.0", "Completed", None),
        ("grandchild-1.0", "Completed", None),
        ("failing-1.0", "Failed", "the command ended with exit status 7"),
        ("absent-1.0", "Failed", "the command did not make its output $out"),
        ("silent-1.0", "Failed", "wrote nothing for 1 s"),
        ("endless-1.0", "Failed", "ran longer than 2 s"),
        ("unknown-1.0", "Failed", "the command ended with exit status 127"),
    ],
)
def test_each_build_ends_as_it_should_at_its_first_attempt(
    pool: Pool, endings: Endings, name: str, status: str, error: str | None
) -> None:
    build = endings.build(name)
    assert (build["status"], build["error"]) == (status, error)
    assert len(pool.get(f"/jobs/build:{build['id']}")["attempts"]) == 1


def test_what_needs_a_failed_build_is_not_started(endings: Endings) -> None:
    build = endings.build("dependent-1.0")
    assert (build["status"], build["attempts"]) == ("DependencyFailed", 0)


def test_logs_hold_both_outputs_and_every_byte(pool: Pool, endings: Endings) -> None:
    failing = pool.log_of(f"build:{endings.build('failing-1.0')['id']}")
    assert failing == b"to say\nto complain\n"
    binary = pool.log_of(f"build:{endings.build('binary-1.0')['id']}")
    assert binary == b"\x00\xff\xfe\r\n\x1b[31m\x80"
    unknown = pool.log_of(f"build:{endings.build('unknown-1.0')['id']}")
    assert b"/no/such/program" in unknown


def test_grandchildren_end_with_their_build(pool: Pool, endings: Endings) -> None:
    job = f"build:{endings.build('grandchild-1.0')['id']}"
    pids = [int(line) for line in pool.log_of(job).split()]
    assert len(pids) == 2
    for pid in pids:
        # Another process may have its number by now.
        assert not is_alive(pid) or psutil.Process(pid).name() != "sleep"
    attempt = pool.get(f"/jobs/{job}")["attempts"][0]
    assert attempt["finished_at"] - attempt["started_at"] < 10, "it waited for a grandchild"
