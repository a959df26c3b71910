import http.server
import os
import socket
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pytest
from gradient_cli.api import Api
from gradient_cli.errors import CommandError, ExitCode
from gradient_cli.main import app
from typer.testing import CliRunner


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "gradient"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment},
    )


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_no_server_is_one_line_and_code_3() -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    ended = run("status", GRADIENT_URL=url)
    assert ended.returncode == ExitCode.SERVER
    assert (
        ended.stderr == f"gradient: no server answers at {url}: start gradient-server, or set GRADIENT_URL\n"
    )


@pytest.mark.parametrize(
    "arguments", [("stauts",), ("build",), ("build", ".", "--tsak", "x"), ("worker", "drain", "w")]
)
def test_wrong_usage_is_one_line_and_code_2(arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert ended.returncode == ExitCode.USAGE
    assert ended.stderr.startswith("gradient: ")
    assert ended.stderr.count("\n") == 1


def test_a_drain_that_stops_half_way_says_of_whom_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, object]] = []

    def post(_: Api, path: str, body: object) -> dict[str, object]:
        asked.append((path, body))
        if "nobody" in path:
            raise CommandError("there is no worker 'nobody'")
        return {}

    monkeypatch.setattr(Api, "post", post)
    drain = ["worker", "drain", "anvil", "nobody", "chisel", "--reason", "new disk", "--deadline", "60"]
    ended = CliRunner().invoke(app, drain)
    told = "there is no worker 'nobody' (done: anvil; not done: nobody, chisel)"
    assert isinstance(ended.exception, CommandError)
    assert (str(ended.exception), ended.exception.code) == (told, ExitCode.SERVER)
    body = {"reason": "new disk", "deadline_secs": 60.0, "undo": False}
    assert asked == [(f"/workers/{name}/drain", body) for name in ("anvil", "nobody")]


def test_a_missing_key_file_is_named() -> None:
    ended = run("status", GRADIENT_API_KEY_FILE="/nonexistent/key")
    assert ended.returncode == ExitCode.USAGE
    assert "cannot read the API key file /nonexistent/key" in ended.stderr


def test_an_address_that_is_none_is_named() -> None:
    ended = run("status", GRADIENT_URL="ftp://example")
    assert ended.returncode == ExitCode.USAGE
    assert "GRADIENT_URL" in ended.stderr


def test_any_name_is_asked_for_as_it_is() -> None:
    class Asked(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            pass

    paths: list[str] = []
    with http.server.HTTPServer(("127.0.0.1", 0), Asked) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for name in ("a?b=c#d-1.0", "ä%41", os.fsdecode(b"\xff"), "build:1"):
                ended = run("show", name, GRADIENT_URL=f"http://127.0.0.1:{server.server_port}")
                assert (ended.returncode, ended.stderr.count("\n")) == (ExitCode.SERVER, 1), ended.stderr
        finally:
            server.shutdown()
            thread.join()
    assert [urllib.parse.unquote(path.removeprefix("/api/v1/jobs/")) for path in paths] == [
        "a?b=c#d-1.0",
        "ä%41",
        r"\udcff",
        "build:1",
    ]


def test_a_name_that_is_no_text_is_one_line_and_code_2(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    url = f"http://127.0.0.1:{closed_port()}"
    ended = run(
        "project", "create", os.fsdecode(b"\xff"),
        GRADIENT_URL=url, GRADIENT_API_KEY_FILE=str(tmp_path / "key"),
    )  # fmt: skip
    assert ended.returncode == ExitCode.USAGE
    assert ended.stderr == "gradient: what you named is no UTF-8 text: name it otherwise\n"
