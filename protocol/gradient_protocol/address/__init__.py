"""Addresses of the wire, and the streams and listeners behind them.

`names` parses and compares, `transport` connects and listens.
"""

from gradient_protocol.address.names import (
    Address,
    TcpAddress,
    TlsAddress,
    UnixAddress,
    is_loopback,
    parse_address,
    transport_security,
)
from gradient_protocol.address.transport import (
    ClientTls,
    connect,
    listener_address,
    open_listeners,
    parse_fingerprint,
)

__all__ = [
    "Address",
    "ClientTls",
    "TcpAddress",
    "TlsAddress",
    "UnixAddress",
    "connect",
    "is_loopback",
    "listener_address",
    "open_listeners",
    "parse_address",
    "parse_fingerprint",
    "transport_security",
]
