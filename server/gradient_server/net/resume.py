"""`ResumeJobs`: the worker says what it has, and the session becomes live (protocol.md, Lost connections).

What the graph decided is sent as `ResumeAck` before anything else about an assignment; then the
scheduler gets the worker, and stored aborts are sent again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import sqlalchemy as sa
import structlog
from gradient_protocol.errors import ProtocolError
from gradient_protocol.kinds import JobKind, ResumeState
from gradient_protocol.messages.server import AbortJob, ResumeAck
from gradient_protocol.messages.worker import ResumedJob, ResumeJobs

from gradient_server.cluster.signals import AdoptedMember
from gradient_server.db.queries.claims import OpenAssignment, note_log, open_assignments
from gradient_server.db.queries.registry import WorkerRow, find_worker, note_worker_seen
from gradient_server.db.tables import derivation, derivation_build
from gradient_server.domain.events import Event
from gradient_server.domain.job import split_job_key
from gradient_server.graph.resume import ResumeDecision, lose_assignments
from gradient_server.graph.resume import resume as decide_resume
from gradient_server.history.adopted import adopted_ram_mb
from gradient_server.net.services import Services
from gradient_server.net.session import Session
from gradient_server.scheduler.model import AssignedJob, WorkerInfo

__all__ = ["lose_worker", "resume"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Resumed:
    """What one transaction found and decided."""

    decision: ResumeDecision
    opened: Mapping[str, OpenAssignment]
    names: Mapping[str, str]
    row: WorkerRow | None
    # MiB by shared build, where it can be told.
    ram_mb: Mapping[str, float]


async def resume(services: Services, session: Session, message: ResumeJobs) -> None:
    """Settle what the worker lists and what it does not, and make the session live."""
    capabilities = session.worker_capabilities
    if capabilities is None:
        raise ProtocolError(400, "ResumeJobs before WorkerCapabilities")

    # What is taken over right now may be this worker's.
    await services.taking_over.passed()
    peaks_mb = services.scheduler.observed_peaks_mb(session.worker_id)

    def decide(connection: sa.Connection) -> tuple[_Resumed, Sequence[Event]]:
        found = _decide(services, session.worker_id, message.running, connection, peaks_mb)
        return found, found.decision.events

    found = await services.transact(decide)
    decision = found.decision
    if found.row is not None:
        session.name = found.row.name
    for adopted in decision.adopted:
        opened = found.opened[adopted.assignment_id]
        session.hold(
            adopted.assignment_id,
            opened.job_key,
            is_member=opened.cluster_attempt is not None,
            log_bytes=adopted.log_offset,
        )
    answer = ResumeAck(adopted=decision.adopted, dropped=decision.dropped)
    session.order.note(answer)
    session.send(answer)
    session.resumed = True
    services.scheduler.worker_connected(
        WorkerInfo(
            id=session.worker_id,
            name=session.name,
            projects=session.projects,
            can=session.capabilities,
            capabilities=capabilities,
        ),
        session,
        _still_working(found, message.running),
    )
    services.clusters.worker_resumed(
        session.worker_id, _adopted_members(found, message.running), decision.lost_members
    )
    if session.worker_draining:
        services.scheduler.draining(session.worker_id, "the worker is draining")
    elif found.row is not None and found.row.drain is not None:
        services.scheduler.draining(session.worker_id, found.row.drain.reason)
    for wanted in decision.aborts:
        session.send(AbortJob(assignment_id=wanted.assignment_id, reason=wanted.text))
    if message.running:
        log.info("a worker resumed", adopted=len(decision.adopted), dropped=len(decision.dropped))


def _decide(
    services: Services,
    worker_id: str,
    running: Sequence[ResumedJob],
    connection: sa.Connection,
    peaks_mb: Mapping[str, int],
) -> _Resumed:
    now = services.clock.now()
    opened = open_assignments(connection, instance_id=services.instance_id, worker_id=worker_id)
    # How much of a log is stored is known to its file; the row learns it here and at the end.
    log_sizes = {one.assignment_id: services.logs.size(one.assignment_id) for one in opened}
    for assignment in opened:
        assignment_id = assignment.assignment_id
        truncated = assignment.log_truncated or services.logs.is_truncated(assignment_id)
        note_log(connection, assignment_id, log_sizes[assignment_id], truncated=truncated)
    decision = decide_resume(
        connection,
        worker_id=worker_id,
        instance_id=services.instance_id,
        running=running,
        now=now,
        ids=services.ids,
        settings=services.graph_settings,
        peaks_mb=peaks_mb,
    )
    # The file may have less than the row says: a restart forgets what was dropped of a truncated log, a
    # crash of the host loses what was not synced. The worker goes on from where the file ends.
    decision.adopted = [
        msgspec.structs.replace(one, log_offset=min(one.log_offset, log_sizes[one.assignment_id]))
        for one in decision.adopted
    ]
    note_worker_seen(connection, worker_id, now=now)
    return _Resumed(
        decision,
        {assignment.assignment_id: assignment for assignment in opened},
        _names(connection, opened),
        find_worker(connection, worker_id),
        adopted_ram_mb(connection, _builds(opened), now=now, retention_days=services.settings.retention_days),
    )


def _still_working(found: _Resumed, running: Sequence[ResumedJob]) -> list[AssignedJob]:
    """The adopted assignments that keep a slot: one whose end is only to be reported has given it back."""
    states = {listed.assignment_id: listed.state for listed in running}
    return [
        AssignedJob(
            assignment_id=adopted.assignment_id,
            job_id=found.opened[adopted.assignment_id].job_key,
            kind=found.opened[adopted.assignment_id].kind,
            name=found.names.get(found.opened[adopted.assignment_id].job_key, ""),
            cluster_attempt=found.opened[adopted.assignment_id].cluster_attempt,
            ram_reserved_mb=found.ram_mb.get(split_job_key(found.opened[adopted.assignment_id].job_key)[1]),
        )
        for adopted in found.decision.adopted
        if states[adopted.assignment_id] is not ResumeState.DONE
        and not found.opened[adopted.assignment_id].report_stored
    ]


def _adopted_members(found: _Resumed, running: Sequence[ResumedJob]) -> list[AdoptedMember]:
    """The members among the adopted assignments, as the runner of clusters takes them."""
    listed = {entry.assignment_id: entry for entry in running}
    members: list[AdoptedMember] = []
    for adopted in found.decision.adopted:
        attempt = found.opened[adopted.assignment_id].cluster_attempt
        if attempt is not None:
            entry = listed[adopted.assignment_id]
            held = entry.state is ResumeState.HELD
            members.append((adopted.assignment_id, attempt, held, entry.signal_n or 0))
    return members


def _builds(opened: Sequence[OpenAssignment]) -> list[str]:
    return [split_job_key(entry.job_key)[1] for entry in opened if entry.kind is JobKind.BUILD]


def _names(connection: sa.Connection, opened: Sequence[OpenAssignment]) -> dict[str, str]:
    builds = _builds(opened)
    if not builds:
        return {}
    query = sa.select(derivation_build.c.id, derivation.c.name).join(
        derivation, derivation.c.id == derivation_build.c.derivation
    )
    rows = connection.execute(query.where(derivation_build.c.id.in_(builds)))
    return {f"build:{build}": name for build, name in rows}


async def lose_worker(services: Services, worker_id: str) -> None:
    """The grace is over and the worker did not come back: what it still has is lost."""
    peaks_mb = services.scheduler.observed_peaks_mb(worker_id)

    def lose(connection: sa.Connection) -> tuple[None, Sequence[Event]]:
        opened = open_assignments(connection, instance_id=services.instance_id, worker_id=worker_id)
        return None, lose_assignments(
            connection,
            [assignment.assignment_id for assignment in opened],
            instance_id=services.instance_id,
            now=services.clock.now(),
            ids=services.ids,
            settings=services.graph_settings,
            peaks_mb=peaks_mb,
        )

    await services.transact(lose)
    services.scheduler.worker_lost(worker_id)
