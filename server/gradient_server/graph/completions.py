"""Builds whose last reports came together, many at once: the ordinary end of a build, in few statements.

`reports` says what a report does; here the same is done for many builds, from their rows read before
anything is written. Whatever is not the ordinary case (a report out of its order, content to be refused,
an output that is not held, a member of a cluster) is left alone and changes nothing: the caller applies
it by itself. On PostgreSQL the builds' assignments, and whatever waits for them, are locked in one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.shapes import BuildOutput
from gradient_protocol.messages.worker import JobCompleted, JobUpdate

from gradient_server.domain.events import AssignmentClosed, BuildChanged, Event
from gradient_server.domain.status import AssignmentStatus
from gradient_server.graph import sql
from gradient_server.graph.aftermath import carry_out
from gradient_server.graph.assignments import (
    Assignment,
    close_assignments,
    find_open,
    store_attempts,
    store_spans,
)
from gradient_server.graph.build_outputs import check_output, store_checked_output
from gradient_server.graph.progress import finish
from gradient_server.graph.settings import GraphSettings
from gradient_server.graph.states import BuildEvent
from gradient_server.graph.transitions import move_builds
from gradient_server.graph.work import Work

__all__ = ["Completion", "complete_together"]

_BUILDS = sql.statement(
    "SELECT b.id, b.derivation, d.name, b.ifd FROM derivation_build b"
    " JOIN derivation d ON d.id = b.derivation WHERE b.id IN [ids]"
)
_OUTPUTS = sql.statement(
    "SELECT o.derivation, o.name, o.path, o.nar_hash, p.nar_hash, p.nar_size FROM derivation_output o"
    " LEFT JOIN cached_path p ON p.path = o.path WHERE o.derivation IN [derivations]"
    " ORDER BY o.derivation, o.position"
)
_SET_HELD = sql.statement(
    "UPDATE derivation_output SET nar_hash = :nar_hash, nar_size = :nar_size"
    " WHERE derivation = :derivation AND name = :name"
)


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one assignment. `accepted`: so did its acceptance, in front of them."""

    assignment_id: str
    worker_id: str
    accepted: bool
    output: JobUpdate | None
    final: JobCompleted


@dataclass(frozen=True, slots=True)
class _Output:
    """An output's row: what was recorded of it, and what is held; None for nothing."""

    path: str
    recorded_hash: str | None
    held_hash: str | None
    held_size: int | None


@dataclass(frozen=True, slots=True)
class _Ending:
    """One build that ends in the ordinary way, and its rows."""

    completion: Completion
    assignment: Assignment
    derivation: int
    name: str
    imported: bool
    outputs: dict[str, _Output]

    @property
    def report(self) -> BuildOutput | None:
        """The BuildOutput that came with it."""
        update = self.completion.output
        return update.update if update is not None and isinstance(update.update, BuildOutput) else None


def complete_together(
    connection: sa.Connection,
    completions: Sequence[Completion],
    *,
    instance_id: str,
    now: float,
    ids: IdSource,
    settings: GraphSettings,
) -> list[list[Event] | None]:
    """The events of each, None for one that is left to be applied alone.

    What follows for others is among the events of the first that is done. Raises as
    `move_builds`; the caller then undoes everything and applies each alone.
    """
    work = Work(connection, now, ids, settings)
    sql.lock_graph_shared(connection)
    endings = _ordinary(work, completions, instance_id)
    if not endings:
        return [None] * len(completions)
    _store_outputs(work, endings)
    _close(work, endings)
    done = [ending.assignment.job for ending in endings]
    move_builds(work, done, BuildEvent.SUCCEEDED)
    finish(
        work,
        done,
        [ending.derivation for ending in endings],
        imported=any(ending.imported for ending in endings),
        names={ending.assignment.job: ending.name for ending in endings},
    )
    return _share_out(completions, endings, carry_out(work))


def _share_out(
    completions: Sequence[Completion], endings: Sequence[_Ending], events: Sequence[Event]
) -> list[list[Event] | None]:
    workers = {ending.assignment.job: ending.assignment.worker_name for ending in endings}
    shares: dict[str, list[Event]] = {ending.assignment.id: [] for ending in endings}
    others = shares[endings[0].assignment.id]
    for event in events:
        if isinstance(event, AssignmentClosed):
            shares.get(event.assignment_id, others).append(event)
        elif isinstance(event, BuildChanged) and event.build in workers:
            others.append(replace(event, worker=workers[event.build]))
        else:
            others.append(event)
    return [shares.get(completion.assignment_id) for completion in completions]


def _ordinary(work: Work, completions: Sequence[Completion], instance_id: str) -> list[_Ending]:
    """Those of `completions` that end in the ordinary way. Reads only."""
    open_ones = {one.id: one for one in find_open(work, [one.assignment_id for one in completions])}
    due = [
        (completion, open_ones[completion.assignment_id])
        for completion in completions
        if completion.assignment_id in open_ones
        and _is_due(completion, open_ones[completion.assignment_id], instance_id)
    ]
    if not due:
        return []
    builds = _rows_by_id(work, [assignment.job for _, assignment in due])
    outputs = _outputs(work, [row[1] for row in builds.values()])
    endings = []
    for completion, assignment in due:
        row = builds.get(assignment.job)
        if row is None:
            continue
        _, derivation, name, imported = row
        ending = _Ending(
            completion, assignment, derivation, name, bool(imported), outputs.get(derivation, {})
        )
        if _is_whole(ending):
            endings.append(ending)
    return endings


def _is_due(completion: Completion, assignment: Assignment, instance_id: str) -> bool:
    """Whether the reports are the next ones of an open build that this worker has from this instance."""
    seqs = [] if completion.output is None else [completion.output.seq]
    seqs.append(completion.final.seq)
    return (
        assignment.worker_id == completion.worker_id
        and assignment.instance_id == instance_id
        and assignment.kind is JobKind.BUILD
        and assignment.cluster_attempt is None
        and assignment.refused_seq is None
        and seqs == list(range(assignment.last_seq + 1, assignment.last_seq + 1 + len(seqs)))
    )


def _is_whole(ending: _Ending) -> bool:
    """Whether the content is accepted, and the server holds every output."""
    if ending.completion.output is not None:
        if ending.report is None:
            return False
        expected = {name: output.path for name, output in ending.outputs.items()}
        if check_output(ending.report, expected) is not None:
            return False
    return all(output.held_hash is not None for output in ending.outputs.values())


def _rows_by_id(work: Work, builds: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    parameters = {"ids": sql.array(work.connection, builds)}
    return {row[0]: row for row in sql.run(work.connection, _BUILDS, parameters)}


def _outputs(work: Work, derivations: Sequence[int]) -> dict[int, dict[str, _Output]]:
    found: dict[int, dict[str, _Output]] = {}
    parameters = {"derivations": sql.array(work.connection, derivations)}
    for derivation, name, *output in sql.run(work.connection, _OUTPUTS, parameters):
        found.setdefault(derivation, {})[name] = _Output(*output)
    return found


def _store_outputs(work: Work, endings: Sequence[_Ending]) -> None:
    """What the reports say, then what is held where that differs: consumers get what is held."""
    held: list[dict[str, object]] = []
    for ending in endings:
        report = ending.report
        reported = {name: output.recorded_hash for name, output in ending.outputs.items()}
        if report is not None:
            store_checked_output(work, ending.assignment, report, ending.derivation)
            reported = {output.name: output.nar_hash for output in report.outputs}
        held.extend(
            {
                "derivation": ending.derivation,
                "name": name,
                "nar_hash": output.held_hash,
                "nar_size": output.held_size,
            }
            for name, output in ending.outputs.items()
            if output.held_hash != reported[name]
        )
    sql.run_many(work.connection, _SET_HELD, held)


def _close(work: Work, endings: Sequence[_Ending]) -> None:
    store_attempts(work, [ending.assignment for ending in endings], "Completed")
    close_assignments(
        work,
        [
            (
                ending.assignment,
                ending.completion.final.seq,
                store_spans(
                    work,
                    ending.assignment,
                    ending.completion.final.spans,
                    ending.completion.final.spans_dropped,
                ),
                ending.completion.accepted,
            )
            for ending in endings
        ],
        AssignmentStatus.COMPLETED,
    )
