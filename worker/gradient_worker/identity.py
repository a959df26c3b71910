"""Who this worker is: `<baseDir>/worker_id`, and the peers file (protocol.md, "Handshake")."""

import os
import stat
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gradient_protocol.credentials import is_credential

__all__ = ["IdentityError", "Peers", "append_peer", "load_or_make_worker_id", "read_peers"]

MAX_PEERS_FILE_BYTES = 1024 * 1024


class IdentityError(Exception):
    """One line that says what is wrong and what to do."""


def load_or_make_worker_id(base_dir: Path, make: Callable[[], str]) -> str:
    """The worker's UUID; made with `make` at the first start.

    Raises IdentityError where the file holds something else or cannot be written.
    """
    file = base_dir / "worker_id"
    try:
        base_dir.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            _write_private(file, make() + "\n")
        text = file.read_text(encoding="ascii").strip()
        return str(uuid.UUID(text))
    except OSError as error:
        raise IdentityError(f"cannot use {error.filename}: {os.strerror(error.errno or 0)}") from None
    except ValueError:
        raise IdentityError(f"{file} holds no UUID; restore it, or remove it and register anew") from None


@dataclass(frozen=True, slots=True, repr=False)
class Peers:
    """Tokens by peer id, `*` for any peer that has no line of its own."""

    tokens: Mapping[str, str]

    def __repr__(self) -> str:
        """Peers only: a token never reaches a log."""
        return f"Peers({sorted(self.tokens)})"


def read_peers(file: Path) -> Peers:
    """Read the peers file; absent is empty.

    Raises IdentityError where others than its owner may read it, or a line is no `peer_id:token`.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Peers({})
    except OSError as error:
        raise IdentityError(f"cannot read {file}: {os.strerror(error.errno or 0)}") from None
    with open(descriptor, "rb") as opened:  # noqa: PTH123 - the descriptor whose mode is judged
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise IdentityError(f"{file} is no regular file")
        if mode & 0o077 and not is_credential(os.environ, file):
            raise IdentityError(f"{file} may be read by others; run: chmod 600 {file}")
        data = opened.read(MAX_PEERS_FILE_BYTES + 1)
    if len(data) > MAX_PEERS_FILE_BYTES:
        raise IdentityError(f"{file} is larger than {MAX_PEERS_FILE_BYTES} bytes")
    return Peers(_parse(file, data))


def _parse(file: Path, data: bytes) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        peer, colon, token = stripped.partition(":")
        if not colon or not peer.strip() or not token.strip():
            raise IdentityError(f"{file}, line {number}: a line is `peer_id:token`")
        tokens[peer.strip()] = token.strip()
    return tokens


def append_peer(file: Path, peers_line: str) -> None:
    """Put a `peer_id:token` line into the peers file, in place of an older one of that peer."""
    peer, _, token = peers_line.strip().partition(":")
    tokens = {**read_peers(file).tokens, peer: token}
    _write_private(file, "".join(f"{name}:{value}\n" for name, value in tokens.items()))


def _write_private(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as opened:  # noqa: PTH123 - made with its mode
            opened.write(text)
            opened.flush()
            os.fsync(descriptor)
        beside.replace(file)
    except BaseException:
        beside.unlink(missing_ok=True)  # it may hold tokens
        raise
