"""The files of systemd/: what systemd itself says of them, and what they promise each other."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gradient_server.config import OPTIONS as SERVER_OPTIONS
from gradient_worker.config import OPTIONS as WORKER_OPTIONS
from gradient_worker.runner import service as runner_service
from gradient_worker.timing import ACK_WAIT_AT_EXIT_SECS, HAND_OVER_FLUSH_SECS

UNITS = Path(__file__).parents[3] / "systemd"
SERVER, WORKER, RUNNER = (
    "gradient-server.service",
    "gradient-worker.service",
    "gradient-worker-runner.service",
)


class _Values(dict[str, str]):
    """Settings that may be given more than once keep all their values, a line each."""

    def __setitem__(self, key: str, value: object) -> None:
        if isinstance(value, list) and key in self:
            value = [*self[key], *value]
        super().__setitem__(key, value)  # type: ignore[assignment]  # lists while the parser reads


def unit(name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, dict_type=_Values)  # type: ignore[call-overload]
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # the documented way
    parser.read(UNITS / name)
    return parser


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    for file in UNITS.glob("*.service"):
        (tmp_path / file.name).write_text(file.read_text().replace("/usr/bin/", f"{programs}/"))
    for name in (SERVER, WORKER, RUNNER):
        assert (programs / name.split(".")[0].removesuffix("-runner")).exists()
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *sorted(map(str, tmp_path.glob("*.service")))],
        capture_output=True,
        text=True,
        check=False,
    )
    # Of other packages' units only: those that this host misses or that are marked as broken.
    ours = [line for line in checked.stderr.splitlines() if "gradient" in line]
    assert (checked.returncode, ours) == (0, [])


@pytest.mark.parametrize("name", [SERVER, WORKER, RUNNER])
def test_each_is_told_of_and_watched(name: str) -> None:
    service = unit(name)["Service"]
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) > 15, "a loop that is blocked for 15 s is a fault that is outlived"
    assert service["RestartPreventExitStatus"] == "2"


def test_the_agent_is_stopped_before_its_runner() -> None:
    # What starts after another is stopped before it.
    assert RUNNER in unit(WORKER)["Unit"]["After"].split()
    assert unit(WORKER)["Unit"]["Requires"] == RUNNER


def test_a_stop_has_the_time_that_it_takes() -> None:
    stops = {name: int(unit(name)["Service"]["TimeoutStopSec"]) for name in (SERVER, WORKER, RUNNER)}
    assert stops[RUNNER] > 2 * runner_service.STOP_SECS
    assert stops[WORKER] > HAND_OVER_FLUSH_SECS + ACK_WAIT_AT_EXIT_SECS


def test_the_runner_has_the_controllers_and_survives_its_builds_memory() -> None:
    service = unit(RUNNER)["Service"]
    assert set(service["Delegate"].split()) == {"memory", "io", "pids"}
    assert service["OOMPolicy"] == "continue"
    assert service["User"] == "root"


def test_every_credential_of_an_option_is_loaded() -> None:
    for name, options in ((SERVER, SERVER_OPTIONS), (WORKER, WORKER_OPTIONS)):
        loaded = re.findall(r"^LoadCredential=(\S+)$", (UNITS / name).read_text(), re.MULTILINE)
        assert sorted(loaded) == sorted(option.credential for option in options if option.credential)


def test_the_users_are_those_of_the_units_and_of_the_builds() -> None:
    users = re.findall(r"^u (\S+) ", (UNITS / "gradient.sysusers.conf").read_text(), re.MULTILINE)
    assert {unit(name)["Service"]["User"] for name in (SERVER, WORKER)} <= set(users)
    builds = [name for name in users if name.startswith("gradient-build-")]
    assert builds == [f"gradient-build-{number}" for number in range(1, len(builds) + 1)]
