import socket
import subprocess
import sys
from pathlib import Path

import pytest
from gradient_cli.errors import ExitCode


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


def test_a_missing_key_file_is_named() -> None:
    ended = run("status", GRADIENT_API_KEY_FILE="/nonexistent/key")
    assert ended.returncode == ExitCode.USAGE
    assert "cannot read the API key file /nonexistent/key" in ended.stderr


def test_an_address_that_is_none_is_named() -> None:
    ended = run("status", GRADIENT_URL="ftp://example")
    assert ended.returncode == ExitCode.USAGE
    assert "GRADIENT_URL" in ended.stderr
