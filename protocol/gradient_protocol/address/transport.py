"""Streams and listeners for the addresses of the wire (protocol.md, "Stream")."""

import hashlib
import hmac
import os
import socket
import ssl
import stat
from pathlib import Path
from typing import Final

import trio

from gradient_protocol.address.names import Address, TcpAddress, TlsAddress, UnixAddress, is_loopback
from gradient_protocol.address.tls import ClientTls, client_context, distrust, server_context

__all__ = ["connect", "listener_address", "open_listeners"]

# A stream shared by control and bulk needs a short queue in the kernel, or a gigabyte of NARs
# stands before an AbortJob (design.md, "One road for a job").
_NOTSENT_LOWAT_BYTES: Final = 128 * 1024
_BACKLOG: Final = 1024


async def connect(address: Address, tls: ClientTls | None = None) -> trio.abc.Stream:
    """A stream to the server at `address`, for `tls://` with its certificate verified.

    OSError when it cannot be reached, its subclasses ssl.SSLError or ssl.CertificateError when it is
    not who it should be, CredentialsError for a CA file of no use, each with one line that says
    what to do. The caller sets the deadline.
    """
    if isinstance(address, UnixAddress):
        return await trio.open_unix_socket(os.fspath(address.path))
    stream = await trio.open_tcp_stream(address.host, address.port)
    _tune(stream)
    if isinstance(address, TcpAddress):
        return stream
    return await _start_tls(stream, address, tls or ClientTls())


async def _start_tls(
    stream: trio.SocketStream, address: TlsAddress, tls: ClientTls
) -> trio.SSLStream[trio.SocketStream]:
    secured: trio.SSLStream[trio.SocketStream] | None = None
    try:
        # The protocol's own lengths show a stream that was cut, so no close_notify is waited for.
        secured = trio.SSLStream(
            stream, client_context(tls), server_hostname=address.host, https_compatible=True
        )
        await secured.do_handshake()
        if tls.fingerprint is not None:
            certificate = secured.getpeercert(binary_form=True) or b""
            found = hashlib.sha256(certificate).digest()
            if not hmac.compare_digest(found, tls.fingerprint):
                raise ssl.CertificateError(
                    f"the certificate of {address} has fingerprint sha256:{found.hex()}, not the pinned one"
                )
    except BaseException as error:
        await trio.aclose_forcefully(stream)
        if isinstance(error, trio.BrokenResourceError) and isinstance(error.__cause__, ssl.SSLError):
            raise distrust(error.__cause__, address, tls) from None
        if isinstance(error, trio.BrokenResourceError):
            raise ConnectionResetError(f"{address} closed the connection during the TLS handshake") from None
        raise
    return secured


async def open_listeners(
    address: Address,
    *,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    insecure_plaintext: bool = False,
) -> list[trio.abc.Listener[trio.abc.Stream]]:
    """Listeners at `address`; a host name may stand for several. Port 0 takes a free one.

    ValueError with one clear line for plain TCP beyond loopback without `insecure_plaintext`, and
    for `tls://` without certificate and key; CredentialsError, an OSError, where those are of no use;
    another OSError when the address cannot be had.
    """
    if isinstance(address, UnixAddress):
        return [_UnixListener(_bind_unix(address.path), address.path)]
    context: ssl.SSLContext | None = None
    if isinstance(address, TlsAddress):
        context = server_context(address, tls_cert, tls_key)
    elif not is_loopback(address) and not insecure_plaintext:
        raise ValueError(
            f"{address} is plain TCP beyond this host: use tls://, or allow it with --insecure-plaintext"
        )
    sockets = await trio.open_tcp_listeners(address.port, host=address.host, backlog=_BACKLOG)
    return [_TcpListener(listener, context) for listener in sockets]


def listener_address(listener: trio.abc.Listener[trio.abc.Stream]) -> Address:
    """Where a listener of `open_listeners` really listens."""
    if not isinstance(listener, _TcpListener | _UnixListener):
        raise TypeError(f"not a listener of open_listeners: {listener!r}")
    return listener.address


class _TcpListener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts plain or TLS streams with the socket options of the wire. TLS shakes hands at first use."""

    def __init__(self, listener: trio.SocketListener, context: ssl.SSLContext | None) -> None:
        self._listener = listener
        self._context = context
        host, port = listener.socket.getsockname()[:2]
        self.address: Address = TlsAddress(host, port) if context else TcpAddress(host, port)

    async def accept(self) -> trio.abc.Stream:
        stream = await self._listener.accept()
        _tune(stream)
        if self._context is None:
            return stream
        return trio.SSLStream(stream, self._context, server_side=True, https_compatible=True)

    async def aclose(self) -> None:
        await self._listener.aclose()


class _UnixListener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts on a Unix socket, and removes its name at the end."""

    def __init__(self, sock: trio.socket.SocketType, path: Path) -> None:
        self._listener = trio.SocketListener(sock)
        self._path = path
        self._identity = _identity(path)
        self.address: Address = UnixAddress(path)

    async def accept(self) -> trio.abc.Stream:
        return await self._listener.accept()

    async def aclose(self) -> None:
        # Another server may have taken the name over in the meantime.
        if _identity(self._path) == self._identity:
            self._path.unlink(missing_ok=True)
        await self._listener.aclose()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _bind_unix(path: Path) -> trio.socket.SocketType:
    """A listening socket at `path`. One that nobody listens on any more is replaced."""
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(path))
        sock.listen(_BACKLOG)
        return trio.socket.from_stdlib_socket(sock)
    except BaseException:
        sock.close()
        raise


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(f"{path} exists and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise OSError(f"{path} is in use: another server listens there")


def _tune(stream: trio.SocketStream) -> None:
    """Nagle off, and a short queue in the kernel."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lowat = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if lowat is not None:
        stream.setsockopt(socket.IPPROTO_TCP, lowat, _NOTSENT_LOWAT_BYTES)
