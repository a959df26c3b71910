"""Keeps the agent connected: one session after the other, by the rules of `reconnect`."""

import ssl
from collections.abc import Awaitable, Callable

import structlog
import trio
from gradient_protocol.address import Address, ClientTls, connect

from gradient_worker.agent import Agent
from gradient_worker.handlers import handle
from gradient_worker.reconnect import Reconnect
from gradient_worker.session import SessionEnd, run_session
from gradient_worker.timing import CONNECT_SECS

__all__ = ["REMEDIES", "Dial", "dialler", "nobody_listens", "one_line", "stay_connected"]

WRONG_INSTANCE = 421
REMEDIES = {
    401: "check the token in the peers file, or register the worker anew: gradient worker register NAME",
    403: "register it as the server says, and put the line that is printed into the peers file",
    496: "another agent runs under this worker id: stop it, or give this one a base directory of its own",
}

logger = structlog.get_logger(__name__)


Dial = Callable[[Address], Awaitable[trio.abc.Stream]]


def dialler(tls: ClientTls) -> Dial:
    """Connects for real. OSError, ssl.SSLError or ssl.CertificateError where that fails."""
    return lambda address: connect(address, tls)


async def stay_connected(agent: Agent, reconnect: Reconnect, dial: Dial) -> None:
    """Run sessions until cancelled."""
    while True:
        address = reconnect.address
        end = await _one_session(agent, address, reconnect, dial)
        redirected = _follow(reconnect, end)
        wait_secs = reconnect.failed(
            has_jobs=len(agent.jobs) > 0, redirected=redirected, nobody_listens=end.nobody_listens
        )
        remedy = {"remedy": REMEDIES[end.code]} if end.code in REMEDIES else {}
        logger.warning(
            "not connected",
            server=str(address),
            reason=end.reason,
            code=end.code,
            retry_in_secs=round(wait_secs, 1),
            **remedy,
        )
        with trio.move_on_after(wait_secs):
            await agent.peers_changed.wait()  # a token may be what was missing


def _follow(reconnect: Reconnect, end: SessionEnd) -> bool:
    if end.code != WRONG_INSTANCE and end.url is None:
        return False
    refusal = reconnect.redirect(end.url)
    if refusal is not None:
        logger.warning("a redirect is not followed", url=end.url, why=refusal)
    return refusal is None


async def _one_session(agent: Agent, address: Address, reconnect: Reconnect, dial: Dial) -> SessionEnd:
    stream: trio.abc.Stream | None = None
    try:
        with trio.move_on_after(CONNECT_SECS):
            stream = await dial(address)
    except (OSError, ssl.SSLError, ssl.CertificateError) as error:
        reason = f"cannot connect: {one_line(error)}"
        return SessionEnd(reason, established=False, nobody_listens=nobody_listens(error))
    if stream is None:
        return SessionEnd(f"cannot connect within {CONNECT_SECS:g} s", established=False)
    return await run_session(agent, stream, handle, established=reconnect.established)


def nobody_listens(error: BaseException) -> bool:
    """Whether that kept us from connecting: a TCP port refuses, a socket's file is gone or left over."""
    if isinstance(error, ConnectionRefusedError | FileNotFoundError):
        return True
    causes = error.__cause__
    if isinstance(causes, BaseExceptionGroup):
        return all(nobody_listens(cause) for cause in causes.exceptions)
    return causes is not None and nobody_listens(causes)


def one_line(error: Exception) -> str:
    """What kept us from connecting."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    text = str(cause or error) or type(error).__name__
    return " ".join(text.split())
