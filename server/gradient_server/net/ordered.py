"""The one task of a session that uses the database: works off, in order, what the reader queued.

Reports that wait together share a transaction, acceptances among them; everything else is one step each.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from gradient_protocol.messages import worker as w

from gradient_server.net import queries
from gradient_server.net.authority import challenge_again, reauthenticate
from gradient_server.net.jobs import answer_assignment, job_refused
from gradient_server.net.reports import REPORTS, Report, apply_reports
from gradient_server.net.resume import resume
from gradient_server.net.services import Services
from gradient_server.net.session import RefusedJob, Session, WorkItem

__all__ = ["work_off"]


async def work_off(services: Services, session: Session) -> None:
    """Runs until the session ends. Raises ProtocolError where a rule ends it."""
    while True:
        reports: list[Report | w.AssignJobResponse] = []
        for item in await session.work.take():
            if isinstance(item, REPORTS):
                reports.append(item)
                continue
            if isinstance(item, w.AssignJobResponse) and _is_acceptance(session, item):
                reports.append(item)
                continue
            if reports:
                await apply_reports(services, session, reports)
                reports = []
            await _STEPS[type(item)](services, session, item)
        if reports:
            await apply_reports(services, session, reports)


def _is_acceptance(session: Session, response: w.AssignJobResponse) -> bool:
    """Whether it only records that a job was taken; a member's answer goes to its attempt."""
    held = session.held(response.assignment_id)
    return response.accepted and held is not None and not held.is_member


async def _reauth(services: Services, session: Session, _message: w.ReauthRequest) -> None:
    await challenge_again(services, session)


# Any: each function takes its own class.
_STEPS: Final[dict[type[WorkItem], Callable[[Services, Session, Any], Awaitable[None]]]] = {
    w.ResumeJobs: resume,
    w.AssignJobResponse: answer_assignment,
    w.ReauthRequest: _reauth,
    w.AuthResponse: reauthenticate,
    w.CacheQuery: queries.cache_query,
    w.QueryKnownDerivations: queries.known_derivations,
    w.ImportRequest: queries.import_request,
    RefusedJob: job_refused,
}
