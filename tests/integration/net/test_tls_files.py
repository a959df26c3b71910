"""Certificates, keys and CA files that do not serve: one line that names the file."""

import datetime as dt
import ssl
from pathlib import Path

import pytest
import trio
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from gradient_protocol.address import (
    ClientTls,
    CredentialsError,
    TlsAddress,
    client_context,
    connect,
    listener_address,
    open_listeners,
    server_context,
)
from gradient_server.cli import run

HERE = TlsAddress("127.0.0.1", 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    long_ago = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    for name, leaf in {
        "good": authority.issue_cert("127.0.0.1"),
        "other": authority.issue_cert("elsewhere.example"),
        "expired": authority.issue_cert(
            "127.0.0.1", not_before=long_ago, not_after=long_ago + dt.timedelta(1)
        ),
    }.items():
        leaf.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
        leaf.private_key_pem.write_to_path(directory / f"{name}.key")
    key = load_pem_private_key((directory / "good.key").read_bytes(), password=None)
    secret = BestAvailableEncryption(b"secret")
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret)
    (directory / "locked.key").write_bytes(locked)
    authority.cert_pem.write_to_path(directory / "ca.pem")
    trustme.CA().cert_pem.write_to_path(directory / "other-ca.pem")
    (directory / "empty").touch()
    (directory / "directory").mkdir()
    return directory


@pytest.mark.parametrize(
    ("cert", "key", "told"),
    [
        ("away.pem", "good.key", "the certificate DIR/away.pem cannot be read: No such file or directory"),
        ("good.pem", "away.key", "the key DIR/away.key cannot be read: No such file or directory"),
        ("good.pem", "directory", "the key DIR/directory cannot be read: Is a directory"),
        ("empty", "good.key", "the certificate DIR/empty holds no certificate in PEM"),
        ("good.key", "good.key", "the certificate DIR/good.key holds no certificate in PEM"),
        ("good.pem", "empty", "the key DIR/empty holds no private key in PEM"),
        ("good.pem", "other.key", "the key DIR/other.key does not belong to the certificate DIR/good.pem"),
        ("good.pem", "locked.key", "the key DIR/locked.key has a passphrase: give one without"),
    ],
)
def test_a_server_says_which_file_does_not_serve(files: Path, cert: str, key: str, told: str) -> None:
    with pytest.raises(CredentialsError) as caught:
        server_context(HERE, files / cert, files / key)
    assert str(caught.value) == told.replace("DIR", str(files))


def test_a_start_that_cannot_listen_leaves_no_key(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--base-dir", str(tmp_path / "base"), "--port", "0", "--proto-listen", "tls://127.0.0.1:0"]
    options += ["--proto-tls-cert", str(files / "good.pem"), "--proto-tls-key", str(files / "away.key")]
    why = f"the key {files}/away.key cannot be read: No such file or directory"
    assert run(["check", *options]) == 1
    assert f"proto.listen: {why}" in capsys.readouterr().out.splitlines()
    assert run(["serve", *options]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == f"gradient-server: cannot listen on tls://127.0.0.1:0: {why}"
    assert "api key" not in said.out
    assert not (tmp_path / "base" / "api-key").exists()


@pytest.mark.parametrize(
    ("ca_file", "told"),
    [
        ("away.pem", "the CA file DIR/away.pem cannot be read: No such file or directory"),
        ("empty", "the CA file DIR/empty holds no certificate in PEM"),
        ("good.key", "the CA file DIR/good.key holds no certificate in PEM"),
    ],
)
def test_a_worker_says_which_ca_file_does_not_serve(files: Path, ca_file: str, told: str) -> None:
    with pytest.raises(CredentialsError) as caught:
        client_context(ClientTls(ca_file=files / ca_file))
    assert str(caught.value) == told.replace("DIR", str(files))


@pytest.mark.parametrize(
    ("cert", "ca_file", "told"),
    [
        ("expired", "ca.pem", "its certificate, or its CA's, has expired: renew it at the server"),
        ("other", "ca.pem", "its certificate is for another name than 127.0.0.1"),
        ("good", "other-ca.pem", "its certificate is signed by none of DIR/other-ca.pem: name the CA"),
        ("good", None, "its certificate is signed by none of this host's CAs: name the CA"),
    ],
)
async def test_a_worker_says_why_it_does_not_trust_a_server(
    files: Path, nursery: trio.Nursery, cert: str, ca_file: str | None, told: str
) -> None:
    (listener,) = await open_listeners(HERE, tls_cert=files / f"{cert}.pem", tls_key=files / f"{cert}.key")
    nursery.start_soon(_shake_hands, listener)
    address = listener_address(listener)
    assert isinstance(address, TlsAddress)
    with pytest.raises(ssl.SSLCertVerificationError) as caught:
        await connect(address, ClientTls(ca_file=None if ca_file is None else files / ca_file))
    assert str(caught.value).startswith(f"{address} is not trusted: {told.replace('DIR', str(files))}")
    nursery.cancel_scope.cancel()


async def _shake_hands(listener: trio.abc.Listener[trio.abc.Stream]) -> None:
    async with listener, await listener.accept() as stream:
        assert isinstance(stream, trio.SSLStream)
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()
