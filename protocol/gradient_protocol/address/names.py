"""Addresses of the wire: `tls://host:port`, `tcp://host:port`, `unix:///path` (protocol.md, "Stream").

Pure: `transport` is what acts.
"""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

__all__ = [
    "Address",
    "TcpAddress",
    "TlsAddress",
    "UnixAddress",
    "is_loopback",
    "parse_address",
    "transport_security",
]

_MAX_UNIX_PATH: Final = 107  # bytes, of Linux's sun_path without its end
_FORMS: Final = "tls://host:port, tcp://host:port or unix:///path"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Plain TCP."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{_bracketed(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsAddress:
    """TLS over TCP."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tls://{_bracketed(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket at an absolute path."""

    path: Path

    def __str__(self) -> str:
        return f"unix://{self.path}"


Address = TcpAddress | TlsAddress | UnixAddress


def parse_address(text: str) -> Address:
    """The address in `text`. ValueError, one line that says what is wrong and what is taken."""
    scheme, separator, rest = text.strip().partition("://")
    if not separator or scheme not in ("tls", "tcp", "unix"):
        raise ValueError(f"{text!r} is no address: use {_FORMS}")
    if scheme == "unix":
        return _parse_unix(text, rest)
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{text!r} is no address: {error}") from None
    if not host:
        raise ValueError(f"{text!r} names no host: use {scheme}://host:port")
    if port is None:
        raise ValueError(f"{text!r} names no port: use {scheme}://{_bracketed(host)}:3001, say")
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{text!r} has more than a host and a port: use {scheme}://host:port")
    return TlsAddress(host, port) if scheme == "tls" else TcpAddress(host, port)


def _parse_unix(text: str, path: str) -> UnixAddress:
    if not path.startswith("/"):
        raise ValueError(f"{text!r} names no absolute path: use unix:///path")
    if "\0" in path or len(path.encode()) > _MAX_UNIX_PATH:
        raise ValueError(f"{text!r} is too long for a Unix socket: at most {_MAX_UNIX_PATH} bytes of path")
    return UnixAddress(Path(path))


def is_loopback(address: Address) -> bool:
    """Whether only this host can be at the other end. A name other than `localhost` is not taken to be."""
    if isinstance(address, UnixAddress):
        return True
    if address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def transport_security(address: Address) -> int:
    """The rank of a transport: 0 plain beyond this host, 1 plain on loopback, 2 TLS or a Unix socket.

    A 421 is followed only to an equal or higher rank.
    """
    if not isinstance(address, TcpAddress):
        return 2
    return 1 if is_loopback(address) else 0


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
