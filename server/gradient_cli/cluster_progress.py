"""Progress of clusters: each member with its worker, and whom the cluster waits for."""

import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradient_cli.cluster_output import member_doing, member_name

__all__ = ["ClusterProgress", "LiveClusterProgress", "PlainClusterProgress", "progress_for_clusters"]

Json = dict[str, Any]


class ClusterProgress(Protocol):
    """Shows each event. Entered before the first, left after the last."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, name: str, data: Json) -> None:
        """One event of the stream."""
        ...


class _Silent:
    """For `--json`: the result alone is printed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, name: str, data: Json) -> None:
        """Nothing to see."""


class PlainClusterProgress(_Silent):
    """A line for each thing that changed, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._told: dict[tuple[str, ...], object] = {}

    def show(self, name: str, data: Json) -> None:
        """Prints what is new in it."""
        if name == "evaluation":
            error = f": {data['error']}" if data.get("error") else ""
            self._tell(("evaluation",), data["status"], f"evaluation {data['status']}{error}")
        elif name == "cluster":
            self._cluster(data)

    def _cluster(self, data: Json) -> None:
        key = data["cluster"]
        # The summary counts seconds too; a line is for what is new.
        lasting = (data["status"], data["stage"], data["attempts"], data["best_zone"], _lacking(data))
        self._tell((key,), lasting, _headline(data))
        for member in data["members"]:
            doing = member_doing(member)
            at = f" on {member['worker']}" if member["worker"] else ""
            place = (key, member["role"], str(member["index"]))
            if place in self._told or member["worker"] or member["status"] not in ("Created", "Queued"):
                self._tell(place, (doing, at), f"  {data['name']}: {member_name(member)}{at}: {doing}")

    def _tell(self, key: tuple[str, ...], value: object, line: str) -> None:
        if self._told.get(key) != value:
            self._told[key] = value
            text = f"{time.monotonic() - self._began:7.1f}s  {line}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveClusterProgress:
    """A table that stays in place: a row for each member."""

    def __init__(self, console: Console) -> None:
        self._began = time.monotonic()
        self._evaluation = "Queued"
        self._clusters: dict[str, Json] = {}
        # It renders once while it is made.
        self._live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, name: str, data: Json) -> None:
        """Redrawn at the next refresh."""
        if name == "evaluation":
            self._evaluation = data["status"]
        elif name == "cluster":
            self._clusters[data["cluster"]] = data

    def _render(self) -> Group:
        parts: list[Text | Table] = [
            Text(f"{time.monotonic() - self._began:6.1f}s  evaluation {self._evaluation}", style="bold")
        ]
        for data in tuple(self._clusters.values()):
            parts.append(Text(_headline(data)))
            table = Table.grid(padding=(0, 2))
            for member in data["members"]:
                table.add_row(
                    Text(f"  {member_name(member)}"),
                    Text(member["worker"] or "", style="cyan"),
                    Text(member["lacking"] or member_doing(member), style="dim"),
                )
            parts.append(table)
        return Group(*parts)


def _headline(data: Json) -> str:
    tries = f", try {data['attempts']} of {data['retry_budget'] + 1}" if data["attempts"] else ""
    return f"cluster {data['name']} {data['status']}{tries}: {data['summary']}"


def _lacking(data: Json) -> tuple[str | None, ...]:
    return tuple(member["lacking"] for member in data["members"])


def progress_for_clusters(*, as_json: bool) -> ClusterProgress:
    """What suits where the output goes. Progress is printed to standard error."""
    if as_json:
        return _Silent()
    console = Console(stderr=True)
    return (
        LiveClusterProgress(console)
        if console.is_terminal and sys.stdout.isatty()
        else PlainClusterProgress(console)
    )
