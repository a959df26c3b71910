"""Options survive the way through a command line."""

import pytest
from gradient_worker.runner.options import RunnerOptions


def test_options_survive_a_command_line() -> None:
    options = RunnerOptions(
        base_dir="/some where/base",
        orphan_kill_secs=0.25,
        cgroup="/sys/fs/cgroup/x",
        grace_secs=7,
        detach=True,
    )
    again = RunnerOptions.parse(options.argv())
    assert {name: getattr(again, name) for name in RunnerOptions.__slots__} == {
        "base_dir": "/some where/base",
        "orphan_kill_secs": 0.25,
        "cgroup": "/sys/fs/cgroup/x",
        "grace_secs": 7,
        "detach": True,
    }


def test_an_equals_sign_is_as_good_as_a_space() -> None:
    options = RunnerOptions.parse(["--base-dir=/a=b", "--orphan-kill-secs=3"])
    assert (options.base_dir, options.orphan_kill_secs, options.detach) == ("/a=b", 3, False)


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "x", ""])
def test_seconds_are_finite_and_not_negative(text: str) -> None:
    with pytest.raises(ValueError, match="--grace-secs needs a number"):
        RunnerOptions.parse(["--base-dir", "/a", "--grace-secs", text])
