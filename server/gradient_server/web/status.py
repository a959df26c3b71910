"""The whole pool at a glance."""

from importlib.metadata import version

import sqlalchemy as sa
from fastapi import APIRouter
from pydantic import BaseModel

from gradient_server.db.tables import build_job, derivation_build, evaluation
from gradient_server.web.auth import Access, Reader
from gradient_server.web.cluster_status import ClusterStanding, cluster_standings
from gradient_server.web.pool import WorkerAnswer, list_pool
from gradient_server.web.state import WebDep

__all__ = ["Status", "router"]

router = APIRouter(tags=["status"])


class Status(BaseModel):
    """`queue`: jobs that could start now, by kind. `evaluations`: all there are, by status.

    `clusters`: those that have not ended, the oldest first, at most 20.
    """

    instance: str
    version: str
    started_at: float
    queue: dict[str, int]
    evaluations: dict[str, int]
    workers: list[WorkerAnswer]
    clusters: list[ClusterStanding]


@router.get("/status")
async def get_status(web: WebDep, access: Reader) -> Status:
    """What waits, what runs, and where."""
    services = web.services
    evaluations, queue = await services.database.read(
        lambda connection: (_evaluations(connection, access), _queue(connection, access))
    )
    return Status(
        instance=services.instance_id,
        version=version("gradient-pair"),
        started_at=web.started_at,
        queue=services.scheduler.snapshot().pending if queue is None else queue,
        evaluations=evaluations,
        workers=await list_pool(services, access),
        clusters=await cluster_standings(services, access),
    )


def _evaluations(connection: sa.Connection, access: Access) -> dict[str, int]:
    row = evaluation.c
    query = sa.select(row.status, sa.func.count().label("number")).group_by(row.status).order_by(row.status)
    if access.project is not None:
        query = query.where(row.project == access.project)
    return {found.status: found.number for found in connection.execute(query)}


def _queue(connection: sa.Connection, access: Access) -> dict[str, int] | None:
    """What waits of the key's project; None for everything, which the scheduler has counted."""
    if access.project is None:
        return None
    queued = sa.select(sa.func.count(sa.distinct(build_job.c.build))).select_from(
        sa.join(build_job, evaluation, build_job.c.evaluation == evaluation.c.id).join(
            derivation_build, derivation_build.c.id == build_job.c.build
        )
    )
    mine = evaluation.c.project == access.project
    builds = connection.scalar(queued.where(mine, derivation_build.c.status == "Queued"))
    waiting = sa.select(sa.func.count()).select_from(evaluation)
    evaluations = connection.scalar(waiting.where(mine, evaluation.c.status == "Queued"))
    return {"Build": builds or 0, "Eval": evaluations or 0}
