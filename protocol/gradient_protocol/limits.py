"""Every figure of the wire in one place (protocol.md). Sizes are bytes, lengths of time seconds."""

from typing import Final

__all__ = [
    "AHEAD_OF_LOG_SECS",
    "BULK_ACK_EVERY",
    "BULK_QUANTUM",
    "BULK_WINDOW",
    "CONTROL_LIMIT",
    "CONTROL_ROOM",
    "HANDSHAKE_SECS",
    "HEARTBEATS_MISSED",
    "HEARTBEAT_SECS",
    "LENGTH_BYTES",
    "MAX_CHUNK_DATA",
    "MAX_ELEMENTS",
    "MAX_ERROR_TEXT",
    "MAX_ID_CHARS",
    "MAX_INT",
    "MAX_MESSAGE",
    "MAX_MESSAGE_BEFORE_INIT",
    "MAX_NESTING",
    "MAX_OFFER_BYTES",
    "MAX_SIGNALS",
    "MAX_SIGNAL_BYTES",
    "MAX_SIGNAL_PAYLOAD",
    "MAX_SPANS",
    "MAX_UNACKNOWLEDGED_REPORTS",
    "MAX_WINDOW_CANDIDATES",
    "PROTO_VERSION",
    "REJECTED_JOB_SECS",
    "REQUEST_REPEAT_SECS",
    "SILENT_SESSION_SECS",
    "TRANSFER_STALL_SECS",
    "WRITE_STALL_SECS",
    "ZSTD_THRESHOLD",
]

KIB: Final = 1024
MIB: Final = 1024 * 1024

PROTO_VERSION: Final = 1

# Frames
LENGTH_BYTES: Final = 4  # u32, big endian
MAX_MESSAGE_BEFORE_INIT: Final = 16 * KIB
MAX_MESSAGE: Final = 4 * MIB
MAX_NESTING: Final = 16
MAX_ELEMENTS: Final = 100_000
MAX_ID_CHARS: Final = 128  # of an id that its maker's peer stores; a UUID has 36
MAX_INT: Final = 2**63 - 1  # what both databases can store
ZSTD_THRESHOLD: Final = 16 * KIB

# Fields
MAX_CHUNK_DATA: Final = 255 * KIB
MAX_ERROR_TEXT: Final = 64 * KIB  # of UTF-8
MAX_WINDOW_CANDIDATES: Final = 1000
MAX_OFFER_BYTES: Final = 1 * MIB
MAX_SIGNAL_PAYLOAD: Final = 64 * KIB
MAX_SIGNALS: Final = 10_000  # an attempt
MAX_SIGNAL_BYTES: Final = 8 * MIB  # an attempt
MAX_SPANS: Final = 2000  # a job

# Lanes and flow
BULK_WINDOW: Final = 4 * MIB  # of one stream, unacknowledged
BULK_ACK_EVERY: Final = 1 * MIB
BULK_QUANTUM: Final = 256 * KIB  # between two looks at the control lane
CONTROL_ROOM: Final = 4 * MIB
CONTROL_LIMIT: Final = 16 * MIB
MAX_UNACKNOWLEDGED_REPORTS: Final = 8  # of one assignment

# Times
HANDSHAKE_SECS: Final = 10.0
HEARTBEAT_SECS: Final = 10.0
HEARTBEATS_MISSED: Final = 3  # of these in a row mean a dead server
SILENT_SESSION_SECS: Final = 20.0
WRITE_STALL_SECS: Final = 30.0
AHEAD_OF_LOG_SECS: Final = 60.0  # without a BulkAck, the final report goes ahead of the log
TRANSFER_STALL_SECS: Final = 60.0
REQUEST_REPEAT_SECS: Final = 10.0
REJECTED_JOB_SECS: Final = 30.0
