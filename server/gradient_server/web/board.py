"""The job board: one page, made here, for whoever wants to see the pool without a command line."""

from datetime import UTC, datetime
from html import escape
from typing import Final

import sqlalchemy as sa
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from gradient_protocol.kinds import JobKind
from pydantic import BaseModel

from gradient_server.db.tables import derivation, derivation_build
from gradient_server.domain.job import build_key, split_job_key
from gradient_server.graph.cluster_views import ClusterSummary, list_clusters
from gradient_server.graph.views import EvaluationSummary, list_evaluations
from gradient_server.scheduler.decisions import Considered, Decision
from gradient_server.scoring.policy import CatalogueEntry, rule_catalogue
from gradient_server.web.auth import Overseer
from gradient_server.web.cluster_status import ClusterStanding, cluster_standings
from gradient_server.web.live import Live
from gradient_server.web.pool import WorkerAnswer, list_pool
from gradient_server.web.state import WebDep

__all__ = ["router"]

router = APIRouter(tags=["board"])

EVALUATIONS: Final = 30
CLUSTERS: Final = 20
DECISIONS: Final = 50
REFRESH_SECS: Final = 5
# No script, nothing from elsewhere, in nobody's frame.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
_STYLE: Final = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #222; }
table { border-collapse: collapse; margin-bottom: 1.5em; }
th, td { text-align: left; padding: .15em .8em .15em 0; vertical-align: top; }
th { border-bottom: 1px solid #999; font-weight: 600; }
td.number, th.number { text-align: right; }
h2 { font-size: 1.1em; margin: 0 0 .3em; }
.quiet { color: #777; } .bad { color: #b00; } .good { color: #070; }
"""
_GOOD: Final = frozenset({"Completed", "connected"})
_BAD: Final = frozenset({"Failed", "Aborted", "disconnected"})


class RuleAnswer(BaseModel):
    """A rule of the resource-aware policy, as breakdowns name it."""

    name: str
    description: str
    enabled: bool


class Rules(BaseModel):
    """The rules of the resource-aware policy, those that are off included."""

    rules: list[RuleAnswer]


@router.get("/board/scoring/rules", response_model=Rules)
async def get_rules(request: Request, _access: Overseer) -> Rules | HTMLResponse:
    """What each rule of a recorded breakdown means; a page for whoever asks for one."""
    entries = rule_catalogue()
    if "text/html" in request.headers.get("accept", ""):
        return _page("rules", _rules(entries), refresh=False)
    return Rules(
        rules=[RuleAnswer(name=one.name, description=one.description, enabled=one.enabled) for one in entries]
    )


@router.get("/board", response_class=HTMLResponse)
async def get_board(web: WebDep, access: Overseer) -> HTMLResponse:
    """Workers, what runs, what waits, recent clusters and evaluations, and how it was decided."""
    services = web.services
    workers = await list_pool(services, access)
    evaluations = await services.database.read(
        lambda connection: list_evaluations(connection, None, EVALUATIONS)
    )
    snapshot = services.scheduler.snapshot()
    decisions = services.scheduler.recent_decisions()[:DECISIONS]
    names = await services.database.read(lambda connection: _names(connection, decisions))
    clusters = await services.database.read(lambda connection: list_clusters(connection, None, CLUSTERS))
    waiting = ", ".join(f"{count} {kind.lower()}" for kind, count in sorted(snapshot.pending.items()))
    held = f", {snapshot.held_back} held back after a failure" if snapshot.held_back else ""
    body = (
        f"<p>Waiting: {escape(waiting + held)}.</p>"
        + _workers(workers)
        + _running(workers)
        + _clusters(await cluster_standings(services, access), clusters)
        + _evaluations(evaluations)
        + _decisions(decisions, names)
        + '<p><a href="/board/scoring/rules">What the rules mean</a></p>'
    )
    return _page("board", body, refresh=True)


def _page(title: str, body: str, *, refresh: bool) -> HTMLResponse:
    again = f'<meta http-equiv="refresh" content="{REFRESH_SECS}">' if refresh else ""
    html = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{again}'
        f"<title>gradient: {escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>gradient</h1>{body}</body></html>"
    )
    return HTMLResponse(html, headers=_HEADERS)


def _table(title: str, headings: list[str], rows: list[list[str]]) -> str:
    """`rows` are cells of HTML, escaped by whoever made them."""
    if not rows:
        return f'<h2>{escape(title)}</h2><p class="quiet">none</p>'
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{lines}</table>"


def _text(value: object) -> str:
    return "-" if value is None or value == "" else escape(str(value))


def _state(value: str) -> str:
    style = "good" if value in _GOOD else "bad" if value in _BAD else "quiet"
    return f'<span class="{style}">{escape(value)}</span>'


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _workers(workers: list[WorkerAnswer]) -> str:
    def row(worker: WorkerAnswer) -> list[str]:
        slots = [worker.slots.get(kind) for kind in ("Build", "Eval")]
        state = _state(worker.state)
        if worker.draining_reason is not None:
            state += f" ({escape(worker.draining_reason)})"
        projects = "all" if worker.projects is None else " ".join(worker.projects)
        return [
            _text(worker.name),
            state,
            _text(worker.zone),
            *("-" if slot is None else f"{slot.used}/{slot.max}" for slot in slots),
            _text(worker.cpu_core_score),
            _text(worker.ram_free_mb),
            _text(" ".join([*worker.architectures, *worker.features])),
            _text(projects),
            _time(worker.last_seen_at),
        ]

    headings = [
        "Worker",
        "State",
        "Zone",
        "Builds",
        "Evals",
        "Score",
        "Free MiB",
        "Systems",
        "Projects",
        "Seen (UTC)",
    ]
    return _table("Workers", headings, [row(worker) for worker in workers])


def _running(workers: list[WorkerAnswer]) -> str:
    rows = [
        [
            _text(job.name),
            _text(job.job),
            _text(worker.name),
            _text(str(Live(job.stage, job.done, job.total))),
        ]
        for worker in workers
        for job in worker.jobs
    ]
    return _table("Running", ["Name", "Job", "Worker", "Stage"], rows)


def _clusters(standings: list[ClusterStanding], newest: list[ClusterSummary]) -> str:
    """Those that have not ended, with whom and what they wait for, then the newest of the others."""

    def row(cluster: str, one: ClusterStanding | ClusterSummary, size: int, told: str | None) -> list[str]:
        tries = f"{one.attempts} of {one.retry_budget + 1}"
        cells = [_text(cluster), _text(one.name), _text(one.project), _state(one.status)]
        return [*cells, _text(size), _text(tries), _text(told)]

    rows = [row(one.cluster, one, one.size, one.summary) for one in standings]
    rows += [row(one.id, one, one.members, one.reason) for one in newest if one.finished_at is not None]
    headings = ["Cluster", "Name", "Project", "Status", "Members", "Tries", "Where it stands"]
    return _table("Clusters", headings, rows)


def _evaluations(evaluations: list[EvaluationSummary]) -> str:
    def row(one: EvaluationSummary) -> list[str]:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(one.counts.items()))
        return [
            _text(one.id),
            _text(f"{one.project}/{one.task}"),
            _state(one.status),
            _text(counts),
            _time(one.created_at),
            _time(one.finished_at),
            _text(one.error),
        ]

    headings = ["Evaluation", "Task", "Status", "Builds", "Submitted (UTC)", "Ended (UTC)", "Error"]
    return _table("Recent evaluations", headings, [row(one) for one in evaluations])


def _names(connection: sa.Connection, decisions: list[Decision]) -> dict[str, str]:
    """The names of the builds that the decisions are about, by job key."""
    keys = {one.job_id for decision in decisions for one in decision.best}
    keys |= {decision.chosen for decision in decisions if decision.chosen is not None}
    builds = [job for kind, job in map(split_job_key, sorted(keys)) if kind is JobKind.BUILD]
    joined = sa.join(derivation_build, derivation, derivation.c.id == derivation_build.c.derivation)
    query = sa.select(derivation_build.c.id, derivation.c.name).select_from(joined)
    rows = connection.execute(query.where(derivation_build.c.id.in_(builds)))
    return {build_key(row.id): row.name for row in rows}


def _decisions(decisions: list[Decision], names: dict[str, str]) -> str:
    def row(decision: Decision) -> list[str]:
        passed = f"{decision.considered} of {decision.pending} considered,"
        passed += f" {decision.vetoed} held, {decision.below_floor} below the floor"
        chosen = decision.chosen and names.get(decision.chosen, decision.chosen)
        return [
            _time(decision.at),
            _text(decision.worker_name),
            _text(str(decision.kind)),
            _text(chosen) if chosen else '<span class="quiet">nothing</span>',
            _text(passed),
            "".join(_considered(one, names.get(one.job_id, one.job_id)) for one in decision.best),
        ]

    headings = ["At (UTC)", "Worker", "Kind", "Given", "Candidates", "The best of them"]
    return _table("Last decisions", headings, [row(one) for one in decisions])


def _considered(one: Considered, name: str) -> str:
    rules = ", ".join(f"{rule} {points:.1f}" for rule, points in one.rules.items() if points)
    held = f"; held by {', '.join(one.vetoes)}" if one.vetoes else ""
    text = escape(f"{rules or 'no points'}{held}")
    return (
        f"<details><summary>{escape(name)}: {one.total:.1f}</summary>"
        f'<span class="quiet">{text}</span></details>'
    )


def _rules(entries: list[CatalogueEntry]) -> str:
    rows = [[_text(one.name), "yes" if one.enabled else "no", _text(one.description)] for one in entries]
    return _table("Rules of the resource-aware policy", ["Rule", "Enabled", "What it does"], rows) + (
        '<p><a href="/board">Back to the board</a></p>'
    )
