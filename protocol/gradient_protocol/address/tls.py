"""What both sides of `tls://` prove themselves with, and what is said where that fails."""

import hashlib
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradient_protocol.address.names import TlsAddress

__all__ = [
    "ClientTls",
    "CredentialsError",
    "client_context",
    "distrust",
    "parse_fingerprint",
    "server_context",
]

# OpenSSL's numbers of why a certificate is not trusted (x509_vfy.h), which Python does not name.
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_UNKNOWN_ISSUERS: Final = frozenset({2, 18, 19, 20, 21})
_OTHER_NAMES: Final = frozenset({62, 64})  # host name, IP address


class CredentialsError(OSError):
    """A certificate, key or CA file that is of no use: one line with its path."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a worker knows its server: a CA file, or the SHA-256 of the server's certificate.

    With neither, the system's CAs. With a fingerprint, name and issuer are not looked at.
    """

    ca_file: Path | None = None
    fingerprint: bytes | None = None  # 32 bytes, of the certificate in DER

    def __post_init__(self) -> None:
        if self.fingerprint is not None and len(self.fingerprint) != hashlib.sha256().digest_size:
            raise ValueError("a SHA-256 fingerprint has 32 bytes")


def parse_fingerprint(text: str) -> bytes:
    """SHA-256 in hex, with or without `sha256:` and colons. ValueError with one clear line."""
    digits = text.strip().lower().removeprefix("sha256:").replace(":", "")
    try:
        value = bytes.fromhex(digits)
    except ValueError:
        value = b""
    if len(value) != hashlib.sha256().digest_size:
        raise ValueError(f"{text!r} is no SHA-256 fingerprint: 64 hex digits are needed")
    return value


def client_context(tls: ClientTls) -> ssl.SSLContext:
    """The client's side of a handshake. CredentialsError where the CA file is of no use."""
    if tls.fingerprint is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the fingerprint is compared instead, before a byte is sent
        return context
    if tls.ca_file is not None:
        _readable("CA file", tls.ca_file)
    try:
        return ssl.create_default_context(cafile=tls.ca_file)
    except ssl.SSLError:
        raise CredentialsError(f"the CA file {tls.ca_file} holds no certificate in PEM") from None


def server_context(address: TlsAddress, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """The server's side. ValueError without certificate and key, CredentialsError where they do not serve."""
    if cert is None or key is None:
        raise ValueError(f"{address} needs a certificate and a key")
    _readable("certificate", cert)
    _readable("key", key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=lambda: _no_passphrase(key))
    except ssl.SSLError as error:
        raise CredentialsError(_why_unusable(error, cert, key)) from None
    return context


def _readable(what: str, file: Path) -> None:
    """OpenSSL's own complaint names no file."""
    try:
        with file.open("rb") as opened:
            opened.read(1)
    except OSError as error:
        raise CredentialsError(f"the {what} {file} cannot be read: {error.strerror}") from None


def _no_passphrase(key: Path) -> str:
    # Else OpenSSL asks for one at the terminal, if there is a terminal.
    raise CredentialsError(f"the key {key} has a passphrase: give one without")


def _why_unusable(error: ssl.SSLError, cert: Path, key: Path) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the key {key} does not belong to the certificate {cert}"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cert)
    except ssl.SSLError:
        return f"the certificate {cert} holds no certificate in PEM"
    if error.reason in (None, "PEM lib", "PEM_LIB", "NO_START_LINE"):
        return f"the key {key} holds no private key in PEM"
    return f"certificate {cert} and key {key} are refused: {error.reason}"


def distrust(error: ssl.SSLError, address: TlsAddress, tls: ClientTls) -> ssl.SSLError:
    """The same error, saying what to do about it where a server's certificate is not trusted."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return error
    known_by = "this host's CAs" if tls.ca_file is None else str(tls.ca_file)
    if error.verify_code == _EXPIRED:
        remedy = "its certificate, or its CA's, has expired: renew it at the server"
    elif error.verify_code == _NOT_YET_VALID:
        remedy = "its certificate is not valid yet: are the clocks of both hosts right?"
    elif error.verify_code in _UNKNOWN_ISSUERS:
        remedy = f"its certificate is signed by none of {known_by}: name the CA that signed it, or pin it"
    elif error.verify_code in _OTHER_NAMES:
        remedy = f"its certificate is for another name than {address.host}"
    else:
        remedy = f"its certificate is refused: {error.verify_message}"
    told = ssl.SSLCertVerificationError(error.errno, f"{address} is not trusted: {remedy}")
    told.verify_code, told.verify_message = error.verify_code, error.verify_message
    return told
