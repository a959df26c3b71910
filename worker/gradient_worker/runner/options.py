"""What a runner is told when it starts."""

# ruff: noqa: PTH100
# (pathlib would cost this small process 1 MiB)

from __future__ import annotations

import os

__all__ = ["RunnerOptions"]


class RunnerOptions:
    """Settings of one runner. They cannot change while it runs.

    `base_dir`: the worker's base directory. `orphan_kill_secs`: how long builds go on without an agent
    (operations.md, `worker.orphanKillSecs`). `cgroup`: `auto`, `off` or the path of a delegated cgroup
    (`worker.build.cgroup`). `grace_secs`: from SIGTERM to SIGKILL. `detach`: leave the caller, who gets
    exit status 0 as soon as the runner listens.
    """

    __slots__ = ("base_dir", "cgroup", "detach", "grace_secs", "orphan_kill_secs")

    def __init__(
        self,
        *,
        base_dir: str | os.PathLike[str],
        orphan_kill_secs: float = 120.0,
        cgroup: str = "auto",
        grace_secs: float = 5.0,
        detach: bool = False,
    ) -> None:
        self.base_dir = os.path.abspath(os.fspath(base_dir))
        self.orphan_kill_secs = orphan_kill_secs
        self.cgroup = cgroup
        self.grace_secs = grace_secs
        self.detach = detach

    def argv(self) -> list[str]:
        """The arguments of `python -m gradient_worker.runner` that make these options again."""
        words = ["--base-dir", self.base_dir, "--cgroup", self.cgroup]
        words += ["--orphan-kill-secs", repr(self.orphan_kill_secs), "--grace-secs", repr(self.grace_secs)]
        return [*words, "--detach"] if self.detach else words

    @classmethod
    def parse(cls, words: list[str]) -> RunnerOptions:
        """Options from arguments as `argv` makes them; ValueError says which word is wrong.

        By hand, for `argparse` alone would cost 1 MiB for the life of the process.
        """
        texts = {"--base-dir": "", "--cgroup": "auto", "--orphan-kill-secs": "120", "--grace-secs": "5"}
        detach = False
        rest = iter(words)
        for word in rest:
            name, equals, value = word.partition("=")
            if word == "--detach":
                detach = True
            elif name in texts:
                texts[name] = value if equals else next(rest, "")
            else:
                raise ValueError(f"unknown argument {word}; known are {', '.join(texts)} and --detach")
        if not texts["--base-dir"]:
            raise ValueError("--base-dir DIR is needed")
        return cls(
            base_dir=texts["--base-dir"],
            cgroup=texts["--cgroup"],
            orphan_kill_secs=_seconds("--orphan-kill-secs", texts["--orphan-kill-secs"]),
            grace_secs=_seconds("--grace-secs", texts["--grace-secs"]),
            detach=detach,
        )


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} needs a number of seconds, not {text!r}")
    return value
