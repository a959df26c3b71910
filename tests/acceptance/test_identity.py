"""Who may work: tokens that are missing, wrong or revoked, files that others may read, certificates."""

import datetime as dt
import hashlib
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.acceptance.pool import Pool
from tests.acceptance.processes import clean_environment, one_line, program, wait_until
from tests.acceptance.trees import Build

ID = "0190b6a4-1111-7111-8111-00000000000a"


def refusal(pool: Pool, name: str) -> dict[str, Any]:
    """The first line of the agent's log that says why it is not connected."""

    def told() -> dict[str, Any] | None:
        for line in (pool.directory / f"{name}.log").read_text().splitlines():
            entry: dict[str, Any] = json.loads(line)
            if entry["event"] == "not connected":
                return entry
        return None

    found = wait_until("a refusal in the agent's log", told)
    assert "\n" not in found["reason"]
    return found


@pytest.fixture(scope="module")
def tls_pool() -> Iterator[Pool]:
    """A server with a certificate of an authority that was made on the spot, and no worker."""
    with Pool() as made:
        made.start_tls_server()
        trustme.CA().cert_pem.write_to_path(made.directory / "other-ca.pem")
        yield made


def test_a_worker_without_a_token_is_told_how_to_get_one(tls_pool: Pool) -> None:
    flags = ("--server-ca-file", str(tls_pool.ca_file))
    tls_pool.start_worker("host-new", *flags, register=False, wait=False)
    assert refusal(tls_pool, "host-new")["code"] in (401, 403)
    log = (tls_pool.directory / "host-new.log").read_text()
    assert "gradient worker register" in log


def test_a_wrong_token_is_refused_until_the_right_one_is_there_and_then_work_starts_at_once(
    tls_pool: Pool,
) -> None:
    evaluation = tls_pool.submit(tls_pool.tree(Build("waiting-1.0")))
    assert "no worker is connected" in tls_pool.gradient("why", f"eval:{evaluation}").stdout
    line = tls_pool.gradient("worker", "register", "host-late", "--worker-id", ID).stdout.strip()
    peer, _, token = line.partition(":")
    tls_pool.write_peers("host-late", f"{peer}:{token[::-1]}\n")
    (tls_pool.directory / "host-late/worker_id").write_text(ID + "\n")
    flags = ("--server-ca-file", str(tls_pool.ca_file))
    tls_pool.start_worker("host-late", *flags, register=False, wait=False)
    refused = refusal(tls_pool, "host-late")
    assert refused["code"] == 401
    assert "check the token" in refused["remedy"]
    tls_pool.write_peers("host-late", line + "\n")
    tls_pool.wait_connected("host-late")
    connected = next(
        json.loads(entry)["timestamp"]
        for entry in (tls_pool.directory / "host-late.log").read_text().splitlines()
        if '"event": "connected"' in entry
    )
    assert tls_pool.ended(evaluation)["status"] == "Completed"
    attempt = tls_pool.get(f"/jobs/eval:{evaluation}")["attempts"][-1]
    assert attempt["accepted_at"] - epoch(connected) < 1.0
    logs = (tls_pool.directory / "host-late.log").read_text() + (
        tls_pool.directory / "server.log"
    ).read_text()
    assert token not in logs
    assert tls_pool.key_file.read_text().strip() not in logs


def epoch(timestamp: str) -> float:
    """Seconds of a log's time."""
    return dt.datetime.fromisoformat(timestamp).timestamp()


def test_a_revoked_worker_is_let_go_and_not_let_in_again(tls_pool: Pool) -> None:
    tls_pool.start_worker("host-gone", "--server-ca-file", str(tls_pool.ca_file))
    assert tls_pool.gradient("worker", "revoke", "host-gone").returncode == 0

    def refused() -> bool:
        return '"code": 403' in (tls_pool.directory / "host-gone.log").read_text()

    wait_until("the refusal of a revoked worker", refused, secs=30)
    states = {worker["name"]: worker["state"] for worker in tls_pool.get("/workers")["workers"]}
    assert states.get("host-gone") in (None, "disconnected")


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("host-ca", ["--server-ca-file", "{directory}/other-ca.pem"], "signed by none of"),
        ("host-print", ["--server-fingerprint", "ab" * 32], "fingerprint"),
    ],
)
def test_a_server_that_is_not_the_known_one_is_refused(
    tls_pool: Pool, name: str, flags: list[str], says: str
) -> None:
    given = [flag.format(directory=tls_pool.directory) for flag in flags]
    tls_pool.start_worker(name, *given, wait=False)
    refused = refusal(tls_pool, name)
    assert refused["code"] is None
    assert says in refused["reason"]


def test_a_pinned_fingerprint_needs_no_authority(tls_pool: Pool) -> None:
    pem = (tls_pool.directory / "cert.pem").read_text()
    fingerprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()
    tls_pool.start_worker("host-pinned", "--server-fingerprint", fingerprint)


def test_a_peers_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    peers = tmp_path / "peers"
    peers.write_text("server:token\n")
    peers.chmod(0o644)
    done = subprocess.run(
        [program("gradient-worker"), "run", "--base-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment(),
    )
    last = subprocess.CompletedProcess(done.args, done.returncode, "", done.stderr.splitlines()[-1])
    assert f"run: chmod 600 {peers}" in one_line(last, 2)


def test_a_wrong_api_key_is_refused(pool: Pool, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("not-the-key\n")
    done = pool.gradient("build", pool.tree(Build("never-1.0")), GRADIENT_API_KEY_FILE=str(key))
    assert "this API key is not known here" in one_line(done, 3)
    missing = pool.gradient("status", GRADIENT_API_KEY_FILE=str(tmp_path / "absent"))
    assert "cannot read the API key file" in one_line(missing, 2)
