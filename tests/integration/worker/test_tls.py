"""The agent knows its server by a CA or by a fingerprint, and gives its tokens to no other."""

import contextlib
import hashlib
import ssl
from pathlib import Path

import pytest
import trio
import trustme
from gradient_protocol.address import TcpAddress, TlsAddress, listener_address, open_listeners
from gradient_worker.app import client_tls
from gradient_worker.config import load
from gradient_worker.connector import dialler

from tests.fakes.agent import Rig


class Certificates:
    """A CA and a server's certificate, as files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        ca = trustme.CA()
        issued = ca.issue_cert("127.0.0.1")
        self.ca, self.cert, self.key = (directory / name for name in ("ca.pem", "cert.pem", "key.pem"))
        ca.cert_pem.write_to_path(str(self.ca))
        issued.cert_chain_pems[0].write_to_path(str(self.cert))
        issued.private_key_pem.write_to_path(str(self.key))

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.cert.read_text())).hexdigest()


async def listen(rig: Rig, certificates: Certificates, nursery: trio.Nursery) -> str:
    (listener,) = await open_listeners(
        TlsAddress("127.0.0.1", 0), tls_cert=certificates.cert, tls_key=certificates.key
    )
    nursery.start_soon(rig.server.accept_from, listener)
    address = listener_address(listener)
    assert isinstance(address, TcpAddress | TlsAddress)
    return f"tls://127.0.0.1:{address.port}"


async def shake_hands(rig: Rig) -> None:
    """A server's streams shake hands at first use."""
    async for stream in rig.server.sessions_in:
        assert isinstance(stream, trio.SSLStream)
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.do_handshake()
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("known_by", ["ca", "fingerprint"])
async def test_a_session_over_tls(rig: Rig, nursery: trio.Nursery, tmp_path: Path, known_by: str) -> None:
    certificates = Certificates(tmp_path / "good")
    rig.settings["server_url"] = await listen(rig, certificates, nursery)
    if known_by == "ca":
        rig.settings["server_ca_file"] = str(certificates.ca)
    else:
        rig.settings["server_fingerprint"] = certificates.fingerprint
    rig.dial = dialler(client_tls(rig.config()))
    async with rig.agent():
        await rig.server.session(nursery)
    nursery.cancel_scope.cancel()


async def test_a_server_of_another_ca_is_refused(rig: Rig, nursery: trio.Nursery, tmp_path: Path) -> None:
    url = await listen(rig, Certificates(tmp_path / "other"), nursery)
    expected = Certificates(tmp_path / "expected")
    nursery.start_soon(shake_hands, rig)
    for flags in ({"server_ca_file": str(expected.ca)}, {"server_fingerprint": expected.fingerprint}):
        config = load(
            file=None, environment={}, flags={"server_url": url, **flags}, hostname="h", cpu_count=1
        ).config
        address = TlsAddress("127.0.0.1", int(url.rpartition(":")[2]))
        with trio.fail_after(10), pytest.raises((ssl.SSLError, ssl.CertificateError)):
            await dialler(client_tls(config))(address)
    nursery.cancel_scope.cancel()
