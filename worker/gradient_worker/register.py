"""`gradient-worker run --register`: registers this worker with the server on the same host.

Uses the server's API key file and its HTTP address, and writes the peers file. What the demo and a
first try on one machine use; elsewhere `gradient worker register` prints the line to put there.
"""

import os
from pathlib import Path
from typing import Any

from gradient_protocol.ids import IdSource

from gradient_worker.config import WorkerConfig
from gradient_worker.identity import IdentityError, append_peer, load_or_make_worker_id, read_peers

__all__ = ["RegistrationError", "register_worker"]

DEFAULT_KEY_FILE = Path("/var/lib/gradient/api-key")
TIMEOUT_SECS = 10.0


class RegistrationError(Exception):
    """One line that says why the server did not register this worker, and what to do."""


def register_worker(config: WorkerConfig, *, url: str, key_file: Path | None) -> None:
    """Register as a base worker, unless the peers file has a token already."""
    try:
        worker_id = load_or_make_worker_id(config.base_dir, IdSource().new)
        if read_peers(config.peers_file).tokens:
            return
        key = _read_key(key_file or DEFAULT_KEY_FILE)
        answer = _post(
            f"{url.rstrip('/')}/api/v1/workers",
            key,
            {"name": config.name, "worker_id": worker_id, "project": None},
        )
        line = answer.get("peers_line")
        if not isinstance(line, str) or ":" not in line:
            raise RegistrationError(f"{url} answered without a peers line; is it a gradient server?")
        append_peer(config.peers_file, line)
    except IdentityError as error:
        raise RegistrationError(str(error)) from None


def _read_key(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "not text"
        text = f"cannot read the server's API key {file}: {reason}; name it with --server-api-key-file"
        raise RegistrationError(text) from None


def _post(url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    import httpx2  # noqa: PLC0415 - of use at registration alone

    try:
        answer = httpx2.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_SECS)
    except httpx2.HTTPError as error:
        raise RegistrationError(f"cannot reach {url}: {error}; is the server up?") from None
    if answer.status_code in (401, 403):
        raise RegistrationError(f"{url} refused the API key; use the file of the server that runs there")
    if answer.status_code >= 400:
        raise RegistrationError(f"{url} answered {answer.status_code}: {answer.text[:200]}")
    try:
        decoded = answer.json()
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        raise RegistrationError(f"{url} answered with something else than JSON; is it a gradient server?")
    return decoded
