"""What committed changes mean for connected workers. Synchronous, as every subscriber of the bus is."""

from collections.abc import Callable

from gradient_protocol.messages.server import ImportResult

from gradient_server.domain.events import AbortWanted, AssignmentClosed, Event, ImportSettled
from gradient_server.net.aborts import send_abort
from gradient_server.net.services import Services

__all__ = ["announcer"]


def announcer(services: Services) -> Callable[[Event], None]:
    """The subscriber that speaks to workers."""

    def on_event(event: Event) -> None:
        if isinstance(event, AssignmentClosed):
            session = services.sessions.get(event.worker_id)
            if session is not None:
                session.assignment_ended(event.assignment_id)
        elif isinstance(event, AbortWanted):
            send_abort(services, event)
        elif isinstance(event, ImportSettled):
            _answer_import(services, event)

    return on_event


def _answer_import(services: Services, event: ImportSettled) -> None:
    """A worker that is away asks again after its resume, as with every query."""
    session = services.sessions.resumed(event.worker_id)
    if session is not None and session.held(event.assignment_id) is not None:
        session.send(
            ImportResult(query_id=event.query_id, ready=list(event.ready), failed=dict(event.failed))
        )
