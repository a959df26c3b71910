"""Tables and lines of the reading commands. What is shown is the server's JSON, nothing more."""

import datetime as dt
import json
from typing import Any

from gradient_protocol.counting import counted
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = [
    "console",
    "live_text",
    "print_decision",
    "print_evaluation",
    "print_job",
    "print_json",
    "print_projects",
    "print_status",
    "print_tasks",
    "print_why",
    "print_workers",
]

Json = dict[str, Any]
console = Console(highlight=False)
if not console.is_terminal:
    # Nobody's window: a table in a file or a pipe keeps its rows on one line each.
    console = Console(highlight=False, width=200)


def print_json(content: Json) -> None:
    """The server's answer, for scripts."""
    console.print(json.dumps(content, indent=2), markup=False, soft_wrap=True)


def _line(text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


def live_text(job: Json) -> str:
    """How far a running job is: `Prefetch 3 of 12`; empty while nothing is known."""
    counted = f"{job['done']} of {job['total']}" if job.get("total") is not None else ""
    return f"{job.get('stage') or ''} {counted}".strip()


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return dt.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _megabytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 1024:.1f} GiB" if value >= 1024 else f"{value} MiB"


def print_evaluation(evaluation: Json) -> None:
    """How an evaluation ended: failures with their reason, then what was asked for."""
    for note in evaluation["notes"]:
        source = f"{note['source']}: " if note.get("source") else ""
        _line(f"{note['level']}: {source}{note['message']}", "red" if note["level"] == "error" else "yellow")
    for build in evaluation["builds"]:
        if build["status"] in ("Failed", "Aborted"):
            _line(
                f"{build['name']} {build['status'].lower()}: {build.get('error') or 'no reason given'}", "red"
            )
            if build["worker"] is not None:  # else nobody ever started it, and there is none
                _line(f"  its log: gradient logs build:{build['id']}", "dim")
    skipped = sum(build["status"] == "DependencyFailed" for build in evaluation["builds"])
    if skipped:
        _line(f"{counted(skipped, 'build')} not started, for something needed failed")
    for output in evaluation["outputs"]:
        if output.get("contains_store_dir"):
            _line(f"warning: {output['path']} contains the name of the directory it was built in", "yellow")
        _line(output["path"])
    told = {f"{note['source']}: {note['message']}" for note in evaluation["notes"]}
    if evaluation.get("error") and evaluation["error"] not in told:
        _line(evaluation["error"], "red")


def print_projects(answer: Json) -> None:
    """One name a line."""
    for project in answer["projects"]:
        _line(project["name"])


def print_tasks(answer: Json) -> None:
    """One task a line, with its limits."""
    for task in answer["tasks"]:
        most, timeout = task["max_concurrent_evaluations"], task["evaluation_timeout_secs"]
        limits = [f"at most {most} at once"] if most is not None else []
        limits += [f"{timeout:g} s each"] if timeout is not None else []
        _line(f"{task['name']}: {', '.join(limits) or 'no limits'}")


def print_workers(workers: list[Json]) -> None:
    """One row a worker."""
    if not workers:
        _line("no workers: gradient worker register NAME, then start gradient-worker on its host")
        return
    table = Table(box=None, pad_edge=False)
    for heading in (
        "WORKER",
        "STATE",
        "ZONE",
        "BUILDS",
        "EVALS",
        "CORES",
        "SCORE",
        "MEMORY",
        "FREE",
        "SYSTEMS",
    ):
        table.add_column(heading)
    for worker in workers:
        slots = {kind: worker["slots"].get(kind) for kind in ("Build", "Eval")}
        state = worker["state"]
        if worker.get("draining_reason"):
            until = worker.get("drain_deadline")
            by = f", until {_time(until)}" if until is not None else ""
            state = f"{state} ({worker['draining_reason']}{by})"
        table.add_row(
            Text(worker["name"]),
            Text(state),
            Text(worker.get("zone") or "-"),
            *(f"{slot['used']}/{slot['max']}" if slot else "-" for slot in slots.values()),
            _number(worker.get("cpu_count")),
            _number(worker.get("cpu_core_score")),
            _megabytes(worker.get("ram_total_mb")),
            _megabytes(worker.get("ram_free_mb")),
            Text(" ".join(worker["architectures"])),
        )
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def print_status(status: Json) -> None:
    """Queue, workers, what runs."""
    queue = status["queue"]
    builds, evaluations = counted(queue.get("Build", 0), "build"), counted(queue.get("Eval", 0), "evaluation")
    _line(f"waiting: {builds}, {evaluations}")
    print_workers(status["workers"])
    for worker in status["workers"]:
        for job in worker["jobs"]:
            _line(f"{worker['name']}: {job['name']} {live_text(job)}".rstrip())
    for cluster in status["clusters"]:
        _line(f"cluster {cluster['name']} ({cluster['cluster']}) {cluster['status']}: {cluster['summary']}")


def print_job(job: Json) -> None:
    """A job and its attempts."""
    _line(
        f"{job['name']} ({job['job']}) is {job['status']}"
        + (f" on {job['worker']}" if job.get("worker") else "")
        + (f", {live_text(job)}" if live_text(job) else "")
    )
    for attempt in job["attempts"]:
        error = f": {attempt['error']}" if attempt.get("error") else ""
        _line(f"  {_time(attempt['started_at'])}  {attempt['worker']}  {attempt['outcome']}{error}")
    if job.get("error"):
        _line(job["error"], "red")


def print_why(why: Json) -> None:
    """Why a job is still pending, or why it went where it went."""
    _line(f"{why['name']} ({why['job']}) is {why['status']}: {why['summary']}")
    for reason in why["reasons"]:
        _line(f"  {reason}")
    for worker in why["workers"]:
        total = f" at {worker['total']:.0f} points" if worker.get("total") is not None else ""
        _line(f"  {worker['name']}: {worker['verdict']}{total}")
        for reason in worker["reasons"]:
            _line(f"    {reason}")
    if why.get("decision"):
        print_decision(why["decision"])


def print_decision(decision: Json) -> None:
    """The breakdown of the score that won, rule by rule, beside that of the next in line."""
    _line(f"  went to {decision['worker']} with {decision['total']:.1f} points")
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("    RULE")
    table.add_column("POINTS", justify="right")
    runner_up = decision.get("runner_up")
    if runner_up:
        table.add_column("NEXT IN LINE", justify="right")
    for rule, points in decision["rules"].items():
        beside = [f"{runner_up['rules'].get(rule, 0.0):.1f}"] if runner_up else []
        table.add_row(f"    {rule}", f"{points:.1f}", *beside)
    console.print(table)
    if runner_up:
        name = runner_up.get("name") or runner_up["job"]
        _line(f"  the next in line was {name} with {runner_up['total']:.1f} points")
