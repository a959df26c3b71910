"""The worker's fixed lengths of time, in seconds (those of the wire are in gradient_protocol.limits)."""

__all__ = [
    "ACK_WAIT_AT_EXIT_SECS",
    "AGENT_DEATHS",
    "ATTEMPT_TOMBSTONE_SECS",
    "BACKOFF_FIRST_SECS",
    "BACKOFF_LIMIT_SECS",
    "BACKOFF_LIMIT_WITH_JOBS_SECS",
    "CLEANUP_SECS",
    "CONNECT_SECS",
    "ERROR_FLUSH_SECS",
    "GARBAGE_INTERVAL_SECS",
    "GRANT_WAIT_SECS",
    "HAND_OVER_FLUSH_SECS",
    "HOST_FAILURE_WINDOW_SECS",
    "KNOCKS",
    "LOG_POLL_SECS",
    "PEERS_POLL_SECS",
    "PROGRESS_SECS",
]

BACKOFF_FIRST_SECS = 1.0
"""The first wait before a reconnect; it doubles from there."""

BACKOFF_LIMIT_SECS = 60.0
BACKOFF_LIMIT_WITH_JOBS_SECS = 15.0

KNOCKS = 80
"""How often in a row an address where nobody listens is tried at the first wait: for about a minute."""

CONNECT_SECS = 10.0
"""How long a TCP and TLS connection may take to stand."""

ATTEMPT_TOMBSTONE_SECS = 300.0
"""How long an aborted attempt is remembered, so that its late AssignJob is rejected."""

LOG_POLL_SECS = 0.25
"""How often a running build's log file is looked at."""

PEERS_POLL_SECS = 3.0
"""How often the peers file is looked at."""

PROGRESS_SECS = 1.0
"""How often the server is told how far jobs are (messages.md: at most one each second)."""

ACK_WAIT_AT_EXIT_SECS = 10.0
"""How long a drained worker waits for its last acknowledgements."""

CLEANUP_SECS = 15.0
"""Longest a shielded clean-up may take: the runner's kill ladder fits inside."""

HOST_FAILURE_WINDOW_SECS = 1.0
"""All builds of a worker that end by signal within this are the host's failure."""

GARBAGE_INTERVAL_SECS = 60.0
"""How often the store's size is compared with its limit."""

GRANT_WAIT_SECS = 3600.0
"""Longest wait for the server's leave to transfer: its slots may be taken by other workers."""

ERROR_FLUSH_SECS = 1.0
"""How long an Error may take to leave before the stream is closed."""

AGENT_DEATHS = 8
"""Agents that may die while they have an assignment, until it is taken for what kills them."""

HAND_OVER_FLUSH_SECS = 2.0
"""How long an agent that hands over may take to say so."""
