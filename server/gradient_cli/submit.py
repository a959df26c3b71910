"""`gradient build`: upload, submit, watch, and say how it went."""

import time
from pathlib import Path
from typing import Any

from gradient_cli.api import Api, part
from gradient_cli.errors import CommandError, ExitCode
from gradient_cli.progress import Progress, State
from gradient_cli.source import SourceTree, upload

__all__ = ["RECONNECTS", "RECONNECT_SECS", "abort", "exit_code", "submit", "watch"]

# As long as the server waits for a worker to come back after its own restart.
RECONNECTS = 30
RECONNECT_SECS = 2.0


def submit(api: Api, path: Path, attrs: list[str], *, project: str, task: str, prioritize: bool) -> str:
    """Uploads the source at `path` and asks for its evaluation. Returns the evaluation's id."""
    source = upload(api, SourceTree.at(path), project)
    answer = api.post(
        "/evaluations",
        {
            "project": project,
            "task": task,
            "source": {"type": "Path", "path": source},
            "attrs": attrs,
            "prioritized": prioritize,
        },
    )
    return str(answer["evaluation"])


def watch(api: Api, evaluation: str, progress: Progress) -> dict[str, Any]:
    """Follows the evaluation to its end, over a few lost connections. Returns its final view."""
    state = State()
    failures = 0
    with progress:
        while not state.is_final:
            try:
                for name, data in api.events(f"/evaluations/{evaluation}/events"):
                    failures = 0
                    state.apply(name, data)
                    progress.show(name, data, state)
            except CommandError as error:
                failures += 1
                if failures > RECONNECTS:
                    raise CommandError(
                        f"{error}; the evaluation goes on: gradient status, gradient logs eval:{evaluation}"
                    ) from None
                time.sleep(RECONNECT_SECS)
                continue
            if not state.is_final:
                # The server ended the stream: it is being restarted.
                failures += 1
                if failures > RECONNECTS:
                    raise CommandError(f"the server ends the event stream of {evaluation} at once")
                time.sleep(RECONNECT_SECS)
    return api.get(f"/evaluations/{evaluation}")


def abort(api: Api, job: str) -> None:
    """Aborts a job by its name or id."""
    api.post(f"/jobs/{part(job)}/abort")


def exit_code(evaluation: dict[str, Any]) -> ExitCode:
    """0 only for a completed evaluation."""
    return ExitCode.DONE if evaluation["status"] == "Completed" else ExitCode.FAILED
