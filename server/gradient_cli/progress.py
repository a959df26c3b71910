"""Progress of an evaluation that a person likes to watch, and plain lines where nobody does."""

import math
import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradient_cli.output import live_text

__all__ = ["LiveProgress", "PlainProgress", "Progress", "SilentProgress", "State", "progress_for"]

Json = dict[str, Any]
FINAL = frozenset({"Completed", "Failed", "Aborted"})
ENDED = frozenset({"Completed", "Failed", "Aborted", "DependencyFailed"})
LIVE = ("stage", "done", "total")
# An evaluation may take minutes: its progress is a line in a file this often.
EVALUATING_EVERY_SECS = 10.0
SHOWN_RUNNING = 12
SHOWN_LINE = 100


@dataclass
class State:
    """An evaluation as its event stream tells it."""

    status: str = "Queued"
    error: str | None = None
    builds: dict[str, Json] = field(default_factory=dict)
    notes: list[Json] = field(default_factory=list)
    last_log: Json | None = None
    evaluating: Json | None = None

    def apply(self, name: str, data: Json) -> None:
        """Takes in one event; names it does not know are left alone."""
        if name == "snapshot":
            self.status, self.error = data["status"], data.get("error")
            self.builds = {build["id"]: build for build in data["builds"]}
            self.notes = list(data["notes"])
            self.evaluating = data.get("evaluating")
        elif name == "build":
            before = self.builds.get(data["id"], {}) if data["status"] == "Assigned" else {}
            self.builds[data["id"]] = {**data, **{name: before.get(name) for name in LIVE}}
        elif name == "stage":
            if data["id"] in self.builds:
                self.builds[data["id"]] |= {name: data.get(name) for name in ("worker", *LIVE)}
        elif name == "evaluating":
            self.evaluating = data
        elif name == "note":
            self.notes.append(data)
        elif name == "log":
            self.last_log = data
        elif name == "evaluation":
            self.status, self.error = data["status"], data.get("error")
            if self.status != "Assigned":
                self.evaluating = None

    @property
    def is_final(self) -> bool:
        """Whether nothing more will come."""
        return self.status in FINAL

    def counts(self) -> dict[str, int]:
        """Builds by status."""
        found: dict[str, int] = {}
        for build in self.builds.values():
            found[build["status"]] = found.get(build["status"], 0) + 1
        return found

    def summary(self) -> str:
        """One line: `12 of 29 built, 4 running, 13 waiting`."""
        counts = self.counts()
        done, running = counts.get("Completed", 0), counts.get("Assigned", 0)
        failed = sum(counts.get(status, 0) for status in ENDED - {"Completed"})
        waiting = len(self.builds) - done - running - failed
        parts = [f"{done} of {len(self.builds)} built"]
        parts += [
            f"{number} {word}"
            for number, word in ((running, "running"), (waiting, "waiting"), (failed, "failed"))
            if number
        ]
        return ", ".join(parts)


class Progress(Protocol):
    """Shows each event. Entered before the first, left after the last."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, name: str, data: Json, state: State) -> None:
        """Called after `state` took the event in."""
        ...


class SilentProgress:
    """For `--json`: the result alone is printed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, name: str, data: Json, state: State) -> None:
        """Nothing to see."""


class PlainProgress(SilentProgress):
    """A line for each thing that happened, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._unfinished: set[str] = set()
        self._there_already = 0
        self._evaluating_told = -math.inf

    def show(self, name: str, data: Json, state: State) -> None:
        """Prints what a reader of a log file wants to know later: not each build that others had done."""
        if name == "snapshot":
            self._unfinished = {build["id"] for build in data["builds"] if build["status"] not in ENDED}
        elif name == "build" and data["status"] not in ENDED:
            self._unfinished.add(data["id"])
        elif name == "build" and data["status"] == "Completed" and data["id"] not in self._unfinished:
            self._there_already += 1
            return
        elif name == "evaluation" and data["status"] in FINAL and self._there_already:
            self._print(f"{self._there_already} of {len(state.builds)} builds were there already")
        line = self._evaluating(data) if name == "evaluating" else _plain_line(name, data, state)
        if line is not None:
            self._print(line)

    def _evaluating(self, data: Json) -> str | None:
        now = time.monotonic()
        if data.get("total") is None or now - self._evaluating_told < EVALUATING_EVERY_SECS:
            return None
        self._evaluating_told = now
        return f"evaluation on {data['worker']}: {live_text(data)}"

    def _print(self, line: str) -> None:
        since = time.monotonic() - self._began
        self._console.print(f"{since:7.1f}s  {line}", markup=False, highlight=False, soft_wrap=True)


def _plain_line(name: str, data: Json, state: State) -> str | None:
    if name == "snapshot":
        return f"evaluation {data['id']} is {data['status']}: {state.summary()}"
    if name == "build" and data["status"] == "Assigned":
        return f"{data['name']} on {data.get('worker') or 'a worker'}"
    if name == "build" and data["status"] in ENDED:
        error = f": {data['error']}" if data.get("error") else ""
        return f"{data['name']} {data['status']}{error} ({state.summary()})"
    if name == "note":
        source = f"{data['source']}: " if data.get("source") else ""
        return f"{data['level']}: {source}{data['message']}"
    if name == "evaluation":
        return f"evaluation {data['status']}" + (f": {data['error']}" if data.get("error") else "")
    return None


class LiveProgress:
    """A small table that stays in place: counts, what runs where, the last line of a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, name: str, data: Json, state: State) -> None:
        """Redraws; notes and failures also stay above the table."""
        if name == "note" or (name == "build" and data["status"] in ENDED - {"Completed"}):
            self._console.print(_plain_line(name, data, state), markup=False, highlight=False)
        self._live.update(self._render(state))

    def _render(self, state: State) -> Group:
        table = Table.grid(padding=(0, 2))
        running = [build for build in state.builds.values() if build["status"] == "Assigned"]
        for build in sorted(running, key=lambda build: (build.get("worker") or "", build["name"]))[
            :SHOWN_RUNNING
        ]:
            table.add_row(*_cells(build, build["name"]))
        if state.evaluating is not None:
            table.add_row(*_cells(state.evaluating, "evaluation"))
        rows: list[Text | Table] = [
            Text(
                f"{time.monotonic() - self._began:6.1f}s  {state.status.lower()}: {state.summary()}",
                style="bold",
            ),
            table,
        ]
        if len(running) > SHOWN_RUNNING:
            rows.append(Text(f"and {len(running) - SHOWN_RUNNING} more", style="dim"))
        if state.last_log is not None:
            line = f"{state.last_log['name']}> {state.last_log['line']}"
            rows.append(Text(line[:SHOWN_LINE], style="dim", no_wrap=True))
        return Group(*rows)


def _cells(job: Json, name: str) -> tuple[Text, Text, Text]:
    return (
        Text(job.get("worker") or "", style="cyan"),
        Text(name),
        Text(live_text(job), style="dim"),
    )


def progress_for(*, as_json: bool) -> Progress:
    """What suits where the output goes. Progress is printed to standard error."""
    if as_json:
        return SilentProgress()
    console = Console(stderr=True)
    return LiveProgress(console) if console.is_terminal and sys.stdout.isatty() else PlainProgress(console)
