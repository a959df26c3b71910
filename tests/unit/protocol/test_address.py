"""Addresses, and the streams and listeners behind them."""

import hashlib
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trustme
from gradient_protocol.address import (
    Address,
    ClientTls,
    TcpAddress,
    TlsAddress,
    UnixAddress,
    connect,
    is_loopback,
    listener_address,
    open_listeners,
    parse_address,
    parse_fingerprint,
    transport_security,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:3001", TcpAddress("127.0.0.1", 3001)),
        ("tls://build.example.org:3001", TlsAddress("build.example.org", 3001)),
        ("tcp://[::1]:3001", TcpAddress("::1", 3001)),
        ("unix:///run/gradient.sock", UnixAddress(Path("/run/gradient.sock"))),
    ],
)
def test_addresses_are_read_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("localhost:3001", "use tls://"),
        ("http://localhost:3001", "use tls://"),
        ("tcp://localhost", "names no port"),
        ("tcp://:3001", "names no host"),
        ("tcp://localhost:99999", "no address"),
        ("tcp://localhost:http", "no address"),
        ("tls://user@host:1", "more than a host"),
        ("tls://host:1/path", "more than a host"),
        ("unix://relative", "no absolute path"),
        ("unix:///" + "x" * 200, "too long"),
    ],
)
def test_a_bad_address_is_one_clear_line(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint) as caught:
        parse_address(text)
    assert "\n" not in str(caught.value)


def test_loopback_and_rank() -> None:
    ranks = {
        "tcp://10.0.0.1:1": 0,
        "tcp://looks-local:1": 0,
        "tcp://localhost:1": 1,
        "tcp://127.8.9.1:1": 1,
        "tcp://[::1]:1": 1,
        "tls://10.0.0.1:1": 2,
        "unix:///run/x": 2,
    }
    for text, rank in ranks.items():
        assert transport_security(parse_address(text)) == rank
        if text.startswith("tcp"):
            assert is_loopback(parse_address(text)) == (rank == 1)


def test_fingerprints() -> None:
    value = hashlib.sha256(b"x").digest()
    assert parse_fingerprint(value.hex()) == value
    assert parse_fingerprint("SHA256:" + value.hex(":").upper()) == value
    for bad in ("", "sha256:12", "zz" * 32):
        with pytest.raises(ValueError, match="64 hex digits"):
            parse_fingerprint(bad)


@asynccontextmanager
async def echoing(address: Address, **options: Path | bool | None) -> AsyncIterator[Address]:
    """A server that sends back what it gets."""

    async def echo(stream: trio.abc.Stream) -> None:
        try:
            async with stream:
                while data := await stream.receive_some():
                    await stream.send_all(data)
        except trio.BrokenResourceError:
            pass

    listeners = await open_listeners(address, **options)  # type: ignore[arg-type]  # a test's shorthand
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, echo, listeners)
        yield listener_address(listeners[0])
        nursery.cancel_scope.cancel()


async def says_hello(address: Address, tls: ClientTls | None = None) -> trio.abc.Stream:
    stream = await connect(address, tls)
    await stream.send_all(b"hello")
    assert await stream.receive_some() == b"hello"
    return stream


async def test_plain_tcp_with_its_socket_options() -> None:
    async with echoing(TcpAddress("127.0.0.1", 0)) as address:
        assert address != TcpAddress("127.0.0.1", 0)
        stream = await says_hello(address)
        assert isinstance(stream, trio.SocketStream)
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 128 * 1024
        await stream.aclose()


async def test_plain_tcp_beyond_loopback_needs_the_flag() -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="--insecure-plaintext"):
            await open_listeners(TcpAddress(host, 0))
    async with echoing(TcpAddress("0.0.0.0", 0), insecure_plaintext=True) as address:
        assert isinstance(address, TcpAddress)
        stream = await says_hello(TcpAddress("127.0.0.1", address.port))
        await stream.aclose()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A CA and a certificate for localhost."""
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost")
    paths = {name: directory / name for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(paths["ca"])
    leaf.cert_chain_pems[0].write_to_path(paths["cert"])
    leaf.private_key_pem.write_to_path(paths["key"])
    return paths


def fingerprint_of(certificate: Path) -> bytes:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.read_text())).digest()


async def test_tls_by_ca_and_by_fingerprint(certificates: dict[str, Path]) -> None:
    options = {"tls_cert": certificates["cert"], "tls_key": certificates["key"]}
    async with echoing(TlsAddress("127.0.0.1", 0), **options) as bound:
        assert isinstance(bound, TlsAddress)
        by_name, by_number = TlsAddress("localhost", bound.port), bound
        pinned = fingerprint_of(certificates["cert"])
        for address, tls in (
            (by_name, ClientTls(ca_file=certificates["ca"])),
            (by_number, ClientTls(fingerprint=pinned)),
        ):
            stream = await says_hello(address, tls)
            await stream.aclose()
        for address, tls in (
            (by_name, None),  # the system's CAs do not know it
            (by_number, ClientTls(ca_file=certificates["ca"])),  # another name
            (by_name, ClientTls(fingerprint=bytes(32))),
        ):
            with pytest.raises(ssl.SSLError) as caught:
                await connect(address, tls)
            assert "certificate" in str(caught.value).lower()


async def test_tls_needs_a_certificate(certificates: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="needs a certificate and a key"):
        await open_listeners(TlsAddress("127.0.0.1", 0), tls_cert=certificates["cert"])


async def test_a_server_that_speaks_no_tls() -> None:
    async with echoing(TcpAddress("127.0.0.1", 0)) as address:
        assert isinstance(address, TcpAddress)
        with pytest.raises(OSError, match=r".+"):
            await connect(TlsAddress("127.0.0.1", address.port), ClientTls(fingerprint=bytes(32)))


async def test_unix_sockets_are_taken_over_only_from_the_dead(tmp_path: Path) -> None:
    address = UnixAddress(tmp_path / "s")
    async with echoing(address) as bound:
        assert bound == address
        stream = await says_hello(address)
        await stream.aclose()
        with pytest.raises(OSError, match="another server listens"):
            await open_listeners(address)
    assert not address.path.exists()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(os.fspath(address.path))
    async with echoing(address):
        stream = await says_hello(address)
        await stream.aclose()
    address.path.write_text("precious")
    with pytest.raises(FileExistsError, match="no socket"):
        await open_listeners(address)
