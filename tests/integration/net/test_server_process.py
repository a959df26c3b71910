"""`gradient-server` as an operator runs it: addresses, keys, signals, errors in one line."""

import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trustme
from gradient_protocol.address import ClientTls, connect, parse_address
from gradient_protocol.ids import IdSource
from gradient_protocol.messages.common import Draining
from gradient_server.cli import run
from gradient_server.db.migrate import migrate
from gradient_server.db.queries.registry import SERVER_PEER, register_worker
from gradient_server.db.runner import Database

from tests.fakes.worker import connected_worker

COMMAND = [sys.executable, "-c", "from gradient_server.cli import main; main()"]


@contextmanager
def serving(base_dir: Path, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, str]]]:
    """A server process and the lines it printed, by their first word."""
    log = base_dir.parent / "log"
    command = [*COMMAND, "serve", "--base-dir", str(base_dir), "--port", "0", *arguments]
    with (
        log.open("a") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            lines: dict[str, str] = {}
            assert process.stdout is not None
            for line in process.stdout:
                name, _, value = line.strip().partition(": ")
                lines[name] = value
                if name == "http":
                    break
            assert "http" in lines, log.read_text()
            yield process, lines
        finally:
            process.kill()


def test_it_prints_where_it_listens_and_stops_on_a_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base_dir = tmp_path / "base"
    listen = f"tcp://127.0.0.1:0,unix://{tmp_path}/socket"
    with serving(base_dir, "--proto-listen", listen) as (process, lines):
        assert lines["workers"] == f"unix://{tmp_path}/socket"
        key = Path(lines["api key"])
        assert key == base_dir / "api-key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert urllib.request.urlopen(f"{lines['http']}/healthz", timeout=10).status == 200
        assert run(["serve", "--base-dir", str(base_dir), "--port", "0"]) == 1
        assert "in use by another gradient-server" in capsys.readouterr().err
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 0
        assert time.monotonic() - began < 10
        assert key.read_text().strip() not in (tmp_path / "log").read_text()
    assert not (tmp_path / "socket").exists()
    with serving(base_dir, "--proto-listen", listen) as (_, lines):
        assert "api key" not in lines, "made once"


async def test_workers_over_tls_are_told_of_the_stop(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    base_dir = tmp_path / "base"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base_dir.mkdir()
    await trio.to_thread.run_sync(migrate, f"sqlite:///{base_dir}/gradient.db")
    database = await Database.open(f"sqlite:///{base_dir}/gradient.db")
    registered = await database.run(
        lambda c: register_worker(c, "host-a", None, SERVER_PEER, now=time.time(), ids=IdSource())
    )
    await database.aclose()
    files = ["--proto-tls-cert", f"{tmp_path}/cert.pem", "--proto-tls-key", f"{tmp_path}/key.pem"]
    address = parse_address(f"tls://localhost:{port}")
    with serving(base_dir, "--proto-listen", f"tls://127.0.0.1:{port}", *files) as (process, _):
        with pytest.raises(ssl.SSLError):
            await connect(address, ClientTls())
        stream = await connect(address, ClientTls(ca_file=tmp_path / "ca.pem"))
        async with connected_worker(
            stream, worker_id=registered.worker_id, tokens={registered.peer: registered.token}
        ) as worker:
            process.send_signal(signal.SIGTERM)
            assert "stopping" in ((await worker.expect(Draining)).reason or "")
            with trio.fail_after(10):
                while worker.ended is None:
                    await trio.sleep(0.02)
        assert await trio.to_thread.run_sync(process.wait, 15) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["serve", "--prot-listen", "x"], 2, "--proto-listen"),
        (["serve", "--port", "many"], 2, "port (--port): a whole number"),
        (["serve", "--metrics-instance-interval-secs", "0"], 2, "1 or more"),
        (["serve", "--config", "/nowhere.toml"], 2, "cannot read /nowhere.toml"),
        (["serve", "--base-dir", "BASE", "--proto-listen", "tcp://0.0.0.0:1"], 1, "--insecure-plaintext"),
        (["serve", "--base-dir", "BASE", "--proto-listen", "tcp://127.0.0.1:x"], 1, "is no address"),
        (["serve", "--base-dir", "BASE", "--database-url", "sqlite:////proc/nothing/here.db"], 1, "/proc"),
        (["migrate", "--base-dir", "/proc/nothing"], 1, "/proc/nothing"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    arguments = [argument.replace("BASE", str(tmp_path / "base")) for argument in arguments]
    assert run(arguments) == code
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert len(lines) == 1, said
    assert text in lines[0]


def test_check_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--base-dir", str(tmp_path / "base")]
    assert run(["check", *base, "--proto-listen", "tcp://nowhere"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == ["proto.listen", "baseDir"]
    assert not (tmp_path / "base").exists(), "check changes nothing"
    (tmp_path / "base").mkdir()
    assert run(["check", *base]) == 1
    assert "run gradient-server migrate" in capsys.readouterr().out
    assert run(["migrate", *base]) == 0
    assert "migrated from an empty database" in capsys.readouterr().out
    assert run(["check", *base]) == 0
    assert capsys.readouterr().out == "configuration and database are in order\n"
