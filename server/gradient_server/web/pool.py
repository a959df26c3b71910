"""The workers as the API shows them: registrations of the database, live figures of the scheduler."""

from typing import Literal

from pydantic import BaseModel

from gradient_server.db.queries.registry import SERVER_PEER, WorkerRow, list_projects, list_workers
from gradient_server.net.services import Services
from gradient_server.scheduler.snapshot import AssignmentSnapshot, WorkerSnapshot
from gradient_server.web.auth import Access
from gradient_server.web.live import live_of_job

__all__ = ["SlotsAnswer", "WorkerAnswer", "WorkerJob", "list_pool"]


class SlotsAnswer(BaseModel):
    """Slots of one kind."""

    used: int
    max: int


class WorkerJob(BaseModel):
    """A job that the worker has. `done` of `total` is what its present stage counts; null while unknown."""

    job: str
    name: str
    kind: str
    stage: str | None
    done: int | None
    total: int | None


class WorkerAnswer(BaseModel):
    """A worker. Live figures are None, and slots absent, while it is not connected.

    `projects`: None serves every project. RAM in MiB, times in seconds since the epoch.
    """

    id: str
    name: str
    state: Literal["connected", "disconnected", "draining"]
    zone: str | None = None
    architectures: list[str] = []
    features: list[str] = []
    cpu_count: int | None = None
    cpu_core_score: float | None = None
    cpu_usage_pct: float | None = None
    ram_total_mb: int | None = None
    ram_free_mb: int | None = None
    slots: dict[str, SlotsAnswer] = {}
    jobs: list[WorkerJob] = []
    last_seen_at: float | None
    draining_reason: str | None = None
    drain_deadline: float | None = None
    projects: list[str] | None


async def list_pool(services: Services, access: Access) -> list[WorkerAnswer]:
    """Every worker with a registration, or connected still, that `access` may see; by name."""
    rows, projects = await services.database.read(
        lambda connection: (list_workers(connection), list_projects(connection))
    )
    names = {project.id: project.name for project in projects}
    connected = {worker.id: worker for worker in services.scheduler.snapshot().workers}
    return [
        _worker(services, row, connected.get(row.id), names, access)
        for row in rows
        if (row.peers or row.id in connected) and _is_shown(row, access)
    ]


def _is_shown(row: WorkerRow, access: Access) -> bool:
    return SERVER_PEER in row.peers or access.sees(row.peers)


def _worker(
    services: Services, row: WorkerRow, live: WorkerSnapshot | None, names: dict[str, str], access: Access
) -> WorkerAnswer:
    base = SERVER_PEER in row.peers
    peers = [peer for peer in row.peers if access.sees([peer])]
    answer = WorkerAnswer(
        id=row.id,
        name=row.name,
        state="disconnected",
        last_seen_at=row.last_seen_at,
        draining_reason=None if row.drain is None else row.drain.reason,
        drain_deadline=None if row.drain is None else row.drain.deadline,
        projects=None if base else sorted(names.get(peer, peer) for peer in peers),
    )
    if live is None:
        return answer
    return answer.model_copy(update=_live(services, live, access))


def _live(services: Services, live: WorkerSnapshot, access: Access) -> dict[str, object]:
    session = services.sessions.get(live.id)
    worker = services.scheduler.pool.workers.get(live.id)
    now = services.clock.now()
    silent_secs = 0.0 if session is None else session.silent_secs(services.clock.monotonic())
    return {
        "state": "connected" if live.draining is None else "draining",
        "draining_reason": live.draining,
        "zone": live.zone,
        "architectures": list(live.architectures),
        "features": list(live.features),
        "cpu_count": None if worker is None else worker.info.capabilities.cpu_count,
        "cpu_core_score": live.cpu_core_score,
        "cpu_usage_pct": live.cpu_usage_pct,
        "ram_total_mb": _whole(live.ram_total_mb),
        "ram_free_mb": _whole(live.ram_free_mb),
        "slots": {kind: SlotsAnswer(used=one.open, max=one.maximum) for kind, one in live.slots.items()},
        "jobs": [_job(services, one) for one in live.assignments if _sees_job(services, one.job_id, access)],
        "last_seen_at": now - silent_secs,
    }


def _job(services: Services, one: AssignmentSnapshot) -> WorkerJob:
    live = live_of_job(services, one.job_id)
    return WorkerJob(
        job=one.job_id, name=one.name, kind=one.kind, stage=live.stage, done=live.done, total=live.total
    )


def _sees_job(services: Services, job_id: str, access: Access) -> bool:
    if access.project is None:
        return True
    assignment = services.scheduler.pool.by_job.get(job_id)
    # Whose an adopted job is the scheduler may not know; then it is not shown.
    return assignment is not None and assignment.job is not None and access.sees(assignment.job.projects)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
