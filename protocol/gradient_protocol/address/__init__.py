"""Addresses of the wire, and the streams and listeners behind them.

`names` parses and compares, `tls` has what proves a side, `transport` connects and listens.
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
from gradient_protocol.address.tls import (
    ClientTls,
    CredentialsError,
    client_context,
    parse_fingerprint,
    server_context,
)
from gradient_protocol.address.transport import connect, listener_address, open_listeners

__all__ = [
    "Address",
    "ClientTls",
    "CredentialsError",
    "TcpAddress",
    "TlsAddress",
    "UnixAddress",
    "client_context",
    "connect",
    "is_loopback",
    "listener_address",
    "open_listeners",
    "parse_address",
    "parse_fingerprint",
    "server_context",
    "transport_security",
]
