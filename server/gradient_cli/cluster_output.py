"""What the reading commands print of clusters. What is shown is the server's JSON, nothing more."""

import datetime as dt
from typing import Any

from gradient_protocol.counting import counted
from rich.table import Table
from rich.text import Text

from gradient_cli.output import console

__all__ = ["member_doing", "member_name", "print_cluster", "print_cluster_why", "print_clusters"]

Json = dict[str, Any]


def member_name(member: Json) -> str:
    """`client 1`, as everywhere."""
    return f"{member['role']} {member['index']}"


def member_doing(member: Json) -> str:
    """What a member does, in a word or two: its job's stage, its place in the try, or its status."""
    seat, stage = member.get("seat"), member.get("stage")
    if seat in ("Starting", "Running") and stage:
        return f"{seat.lower()}, {stage}"
    return str(seat.lower() if seat else member["status"])


def _line(text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return dt.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    return table


def print_clusters(answer: Json) -> None:
    """One row a cluster, the newest first."""
    if not answer["clusters"]:
        _line("no clusters: gradient cluster submit DIRECTORY asks for those of its gradient.toml")
        return
    table = _table("CLUSTER", "NAME", "PROJECT", "STATUS", "MEMBERS", "TRIES", "SUBMITTED", "THE LAST TRY")
    for one in answer["clusters"]:
        tries = f"{one['attempts']} of {one['retry_budget'] + 1}"
        cells = [one["id"], one["name"], one["project"], one["status"], str(one["size"]), tries]
        table.add_row(*map(Text, [*cells, _time(one["created_at"]), one["reason"] or "-"]))
    console.print(table)


def print_cluster(cluster: Json) -> None:
    """A cluster, its members, and each try with the times of all members."""
    _line(
        f"{cluster['name']} ({cluster['id']}) is {cluster['status']},"
        f" {cluster['attempts']} of {cluster['retry_budget'] + 1} tries started"
        + (", all members in one zone" if cluster["same_zone"] else "")
    )
    table = _table("  MEMBER", "JOB", "BUILD", "STATUS")
    for member in cluster["members"]:
        marks = " (primary)" if member["primary"] else ""
        pinned = f", pinned to {member['pin']}" if member["pin"] else ""
        table.add_row(
            Text(f"  {member_name(member)}{marks}"),
            Text(member["job"]),
            Text(member["name"] + pinned),
            Text(_status(member)),
        )
    console.print(table)
    if cluster["left_off"]:
        _line(f"{cluster['left_off']} older tries are not shown")
    for one in cluster["tries"]:
        _print_try(one)
    if cluster["path"]:
        _line("how it came about: " + "; then ".join(cluster["path"]))


def _status(member: Json) -> str:
    waits = f", waits for {', '.join(member['waits_for'])}" if member["waits_for"] else ""
    return f"{member['status']}{waits}"


def _print_try(one: Json) -> None:
    zero = one["created_at"]
    outcome = one["outcome"] or ("under way" if one["started_at"] is None else "running")
    started = (
        "never started" if one["started_at"] is None else f"started after {one['started_at'] - zero:.2f} s"
    )
    if one["outcome"] is None and one["started_at"] is None:
        started = "its members are asked"
    reason = f": {one['reason']}" if one["reason"] else ""
    _line(f"\ntry at {_time(zero)}, {started}, {outcome}{reason}")
    table = _table(
        "  MEMBER", "WORKER", "ASSIGNED", "ACCEPTED", "STARTED", "CLOSED", "OUTCOME", "WHAT IT DID"
    )
    for member in one["members"]:
        table.add_row(
            Text(f"  {member_name(member)}"),
            Text(member["worker"] or "-"),
            *(
                Text(_after(at, zero), justify="right")
                for at in (
                    member["assigned_at"],
                    member["accepted_at"],
                    one["started_at"],
                    member["finished_at"],
                )
            ),
            Text(member["outcome"] or ("reported" if member["reported"] else "-")),
            Text(", ".join(_span(span, zero) for span in member["spans"] if span["parent"] is None) or "-"),
        )
    console.print(table)
    for member in one["members"]:
        if member["error"] and member["outcome"] not in ("Aborted", None):
            _line(f"  {member_name(member)}: {member['error'].splitlines()[0]}", "red")
            _line(f"    its log: gradient logs {member['job']} --attempt {member['log']}", "dim")


def _after(at: float | None, zero: float) -> str:
    return "-" if at is None else f"{at - zero:+.2f} s"


def _span(span: Json, zero: float) -> str:
    return f"{span['kind']} {span['start'] - zero:+.2f}..{span['end'] - zero:+.2f}"


def print_cluster_why(why: Json) -> None:
    """Whom and what a cluster waits for, or where its try stands."""
    _line(f"{why['name']} ({why['cluster']}) is {why['status']}: {why['summary']}")
    zone = why["best_zone"]
    if zone is not None:
        where = "the pool" if zone["zone"] is None else f"zone {zone['zone']}"
        _line(
            f"  {where} seats {zone['seats_idle']} of {zone['size']} now,"
            f" {zone['seats_able']} of {zone['size']} if every worker were idle"
        )
    if why["waiting_secs"] is not None:
        _line(f"  every member could start since {why['waiting_secs']:.0f} s")
    for member in why["members"]:
        _line(f"  {_member_line(member)}")
    _print_reservation(why)
    if why["expected_start_secs"] is not None:
        _line(f"  expected to start in {why['expected_start_secs']:.0f} s")
    last = why["last_failure"] or why["reason"]
    if last and last not in why["summary"]:
        _line(f"  the last try ended: {last}")


def _member_line(member: Json) -> str:
    name = f"{member_name(member)} ({member['name']})"
    if member["worker"]:
        return f"{name} at {member['worker']}: {member_doing(member)}"
    if member["lacking"]:
        # It begins with the member's name, for it can stand alone.
        return f"{name}: {member['lacking'].removeprefix(member_name(member)).lstrip(':, ')}"
    if member["arrived"]:
        return f"{name}: able: {counted(member['able'], 'worker')}, {member['idle']} of them idle"
    return f"{name}: {member['status']}" + (f", {member['error']}" if member["error"] else "")


def _print_reservation(why: Json) -> None:
    if why["reserved_by_other"]:
        _line(f"  the pool's reservation is held by {why['reserved_by_other']}")
    reservation = why["reservation"]
    if reservation is None:
        return
    _line(
        f"  its seats are reserved since {reservation['held_secs']:.0f} s,"
        f" for {reservation['left_secs']:.0f} s more"
    )
    for seat in reservation["seats"]:
        runs = "idle" if seat["is_idle"] else f"runs {', '.join(seat['running']) or 'something'}"
        _line(f"    {member_name(seat)} at {seat['worker']}: {runs}")
