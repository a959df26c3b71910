"""When and where the worker connects next. Pure: the randomness is passed in.

- Jittered backoff, 1 s doubling to 60 s, but at most 15 s while there are jobs. A session that got
  as far as its ResumeAck starts it anew.
- Where nobody listens there is no server to spare: a server that restarts is back within seconds, and
  finds its workers at once if they have gone on knocking, for a minute, at the first wait.
- A 421 (or a Draining with a URL) names another instance. It is followed only to equal or better
  transport security, tried once and at once, and given up for the configured address when it fails.
- 401, 403 and 496 are tried again like anything else: a worker that is registered a minute later,
  or whose older session ends, needs nobody to restart it.
"""

from collections.abc import Callable

from gradient_protocol.address import Address, parse_address, transport_security

from gradient_worker.timing import (
    BACKOFF_FIRST_SECS,
    BACKOFF_LIMIT_SECS,
    BACKOFF_LIMIT_WITH_JOBS_SECS,
    KNOCKS,
)

__all__ = ["Reconnect"]

MAX_HOPS = 3
"""Redirects followed in a row: two instances that send a worker to each other must not spin it."""


class Reconnect:
    """The addresses and the backoff of one agent. `jitter` gives a float in [0, 1)."""

    def __init__(self, configured: Address, jitter: Callable[[], float]) -> None:
        self._configured = configured
        self._jitter = jitter
        self._redirect: Address | None = None
        self._hops = 0
        self._backoff_secs = BACKOFF_FIRST_SECS
        self._knocks = 0

    @property
    def address(self) -> Address:
        """Where to connect now."""
        return self._redirect or self._configured

    def established(self) -> None:
        """A session came as far as its ResumeAck."""
        self._backoff_secs = BACKOFF_FIRST_SECS
        self._hops = 0
        self._knocks = 0

    def redirect(self, url: str | None) -> str | None:
        """A server named another instance. Returns why it is not followed, None where it is."""
        if url is None:
            return "the server named no other address"
        if self._hops >= MAX_HOPS:
            return f"{MAX_HOPS} redirects in a row led to no session"
        try:
            address = parse_address(url)
        except ValueError as error:
            return str(error)
        if transport_security(address) < transport_security(self._configured):
            return f"{url} is less secure than the configured address"
        self._redirect = address
        self._hops += 1
        return None

    def failed(self, *, has_jobs: bool, redirected: bool = False, nobody_listens: bool = False) -> float:
        """A connection ended or did not come about; `redirected`: because `redirect` was followed.

        Returns how many seconds to wait. A redirect that failed is given up for the configured
        address, with the usual wait. `nobody_listens`: the address was reached, and no server at it.
        """
        if redirected:
            return 0.0
        self._redirect = None
        if nobody_listens and self._knocks < KNOCKS:
            self._knocks += 1
            return self._jittered(BACKOFF_FIRST_SECS)
        limit = BACKOFF_LIMIT_WITH_JOBS_SECS if has_jobs else BACKOFF_LIMIT_SECS
        wait = min(self._backoff_secs, limit)
        self._backoff_secs = min(self._backoff_secs * 2, BACKOFF_LIMIT_SECS)
        return self._jittered(wait)

    def _jittered(self, secs: float) -> float:
        return secs * (0.5 + self._jitter() / 2)
