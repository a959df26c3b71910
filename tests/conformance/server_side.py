"""Is this a server? Checks that play a worker in raw frames (protocol.md, messages.md).

`check_server(make_server)` runs them all; each of CHECKS can be run alone. `make_server` is a function
without arguments whose async context manager yields a `ServerUnderTest`: a fresh server, or one
whose worker has nothing to do.
"""

from collections.abc import Awaitable, Callable

from tests.conformance.server_handshake import (
    check_a_worker_id_is_connected_once,
    check_capabilities_are_what_both_have,
    check_handshake,
    check_handshake_refusals,
    check_one_good_token_is_enough,
    check_order_before_resume_ack,
    check_unknown_assignments_are_dropped,
)
from tests.conformance.server_jobs import (
    check_a_rejected_assignment_leaves_the_session,
    check_draining_and_errors,
    check_job_loop,
    check_log_chunks,
    check_numbered_reports,
    check_refused_reports,
    check_resume,
)
from tests.conformance.server_limits import (
    check_malformed_after_resume,
    check_malformed_before_init_ack,
    check_zstd_envelope,
)
from tests.conformance.server_session import MakeServer, ServerUnderTest

__all__ = ["CHECKS", "MakeServer", "ServerUnderTest", "check_server"]

CHECKS: tuple[Callable[[MakeServer], Awaitable[None]], ...] = (
    check_handshake,
    check_capabilities_are_what_both_have,
    check_handshake_refusals,
    check_one_good_token_is_enough,
    check_a_worker_id_is_connected_once,
    check_malformed_before_init_ack,
    check_malformed_after_resume,
    check_zstd_envelope,
    check_order_before_resume_ack,
    check_unknown_assignments_are_dropped,
    check_job_loop,
    check_log_chunks,
    check_numbered_reports,
    check_refused_reports,
    check_resume,
    check_a_rejected_assignment_leaves_the_session,
    check_draining_and_errors,
)


async def check_server(make_server: MakeServer) -> None:
    """Runs every check, each against a server of its own."""
    for check in CHECKS:
        await check(make_server)
