"""Real processes of a pool, started as an operator would, in a directory of their own.

Everything is ended by its pid, with the runners that outlive their agents. Whatever waits here has a
deadline, after which it tells the end of every log.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx2
import psutil
import trustme

from tests.acceptance.processes import READY_SECS, clean_environment, free_port, program, wait_until
from tests.acceptance.trees import Build, write_tree

__all__ = ["COMMAND_SECS", "FINAL", "Pool", "Started", "Worker", "by_name"]

Json = dict[str, Any]

# Several times what these take on two quiet cores.
END_SECS = 30.0
COMMAND_SECS = 100.0
FINAL = {"Completed", "Failed", "Aborted", "DependencyFailed"}
TAIL_BYTES = 4096


class Started:
    """A process and its output."""

    def __init__(
        self, arguments: list[str], output: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.output = output
        with output.open("ab") as log:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=clean_environment(environment),
            )
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, if it is there."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, secs: float = END_SECS) -> int:
        """The exit status. subprocess.TimeoutExpired where it does not end."""
        return self._process.wait(secs)

    def end(self, number: signal.Signals) -> int:
        """Sends a signal and waits for the end; what stays is killed."""
        self.send(number)
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


@dataclass(slots=True)
class Worker:
    """An agent, and how to start it again."""

    name: str
    base_dir: Path
    arguments: list[str]
    process: Started
    environment: Mapping[str, str]

    @property
    def store(self) -> Path:
        """Its directory store."""
        return self.base_dir / "store"

    def runner(self) -> psutil.Process | None:
        """The runner of this worker, if one is alive."""
        try:
            process = psutil.Process(int((self.base_dir / "runner/lock").read_text()))
            if str(self.base_dir) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                return process
        except (OSError, ValueError, psutil.NoSuchProcess):
            return None
        return None


class Pool:
    """A server and its workers. Ends all of it, and removes its directory, on leaving."""

    def __init__(self) -> None:
        # Short, for Unix sockets are below it.
        self.directory = Path(tempfile.mkdtemp(prefix="gradient-acceptance-"))
        self.server_dir = self.directory / "server"
        self.server: Started | None = None
        self.workers: dict[str, Worker] = {}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.listen = f"unix://{self.directory}/socket"
        self._server_flags: list[str] = []
        self._server_environment: Mapping[str, str] = {}
        self._api = httpx2.Client(base_url=f"{self.url}/api/v1", timeout=30.0, trust_env=False)
        self._trees = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.close()
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            if self.server:
                stack.callback(self.server.end, signal.SIGTERM)
            for name in self.workers:
                stack.callback(self.stop_worker, name)
            for worker in self.workers.values():
                worker.process.send(signal.SIGTERM)

    # The server

    @property
    def key_file(self) -> Path:
        """The first API key."""
        return self.server_dir / "api-key"

    def start_server(
        self, *flags: str, listen: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts it and waits until it listens."""
        self._server_environment = environment or {}
        self.listen = listen or self.listen
        self._server_flags = [
            "--base-dir", str(self.server_dir), "--port", str(self.port),
            "--proto-listen", self.listen, *flags,
        ]  # fmt: skip
        self.restart_server()

    def start_tls_server(self, *flags: str) -> None:
        """Starts it with a certificate of an authority that is made for it, `ca.pem`."""
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        cert, key = self.directory / "cert.pem", self.directory / "key.pem"
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        authority.cert_pem.write_to_path(self.ca_file)
        self.start_server(
            "--proto-tls-cert", str(cert), "--proto-tls-key", str(key), *flags,
            listen=f"tls://127.0.0.1:{free_port()}",
        )  # fmt: skip

    @property
    def ca_file(self) -> Path:
        """Where the authority of `start_tls_server` is."""
        return self.directory / "ca.pem"

    def restart_server(self) -> None:
        """Starts it with the same options again."""
        output = self.directory / "server.log"
        shown = output.stat().st_size if output.exists() else 0
        self.server = server = Started(
            [program("gradient-server"), "serve", *self._server_flags], output, self._server_environment
        )

        def listens() -> bool:
            assert server.code is None, self.logs()
            return b"\nhttp: " in b"\n" + output.read_bytes()[shown:]

        wait_until("a server that listens", listens)

    # Workers

    def start_worker(
        self,
        name: str,
        *flags: str,
        register: bool = True,
        wait: bool = True,
        environment: Mapping[str, str] | None = None,
        url: str | None = None,
    ) -> Worker:
        """Starts an agent, by default registered by `run --register`, and waits until it is connected.

        `url`: where it finds the server, if not where that listens.
        """
        base_dir = self.directory / name
        arguments = [
            program("gradient-worker"), "run", "--name", name, "--base-dir", str(base_dir),
            "--server-url", url or self.listen, "--system-cpu-core-score", "1000", *flags,
        ]  # fmt: skip
        if register:
            arguments += ["--register", "--server-http-url", self.url]
            arguments += ["--server-api-key-file", str(self.key_file)]
        process = Started(arguments, self.directory / f"{name}.log", environment)
        self.workers[name] = Worker(name, base_dir, arguments, process, environment or {})
        if wait:
            self.wait_connected(name)
        return self.workers[name]

    def stop_worker(self, name: str) -> None:
        """Ends an agent and its runner, with whatever they build."""
        worker = self.workers[name]
        try:
            worker.process.end(signal.SIGTERM)
        finally:
            runner = worker.runner()
            if runner is not None:
                runner.terminate()
                try:
                    runner.wait(END_SECS)
                except psutil.TimeoutExpired:
                    runner.kill()
                    raise

    def restart_worker(self, name: str) -> None:
        """Starts an agent with the same options again."""
        worker = self.workers[name]
        worker.process = Started(worker.arguments, self.directory / f"{name}.log", worker.environment)

    def wait_connected(self, *names: str) -> None:
        """Returns once all of them are."""

        def connected() -> bool:
            for name in names:
                assert self.workers[name].process.code is None, self.logs()
            states = {worker["name"]: worker["state"] for worker in self.get("/workers")["workers"]}
            return all(states.get(name) == "connected" for name in names)

        wait_until(f"{', '.join(names)} connected", connected)

    def write_peers(self, name: str, text: str, mode: int = 0o600) -> None:
        """What an operator puts into the peers file."""
        file = self.directory / name / "peers"
        file.parent.mkdir(exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(text)
        file.chmod(mode)

    # The command

    def environment(self) -> dict[str, str]:
        """What the command is configured with."""
        return clean_environment(
            {"GRADIENT_URL": self.url, "GRADIENT_API_KEY_FILE": str(self.key_file), "NO_COLOR": "1"}
        )

    def gradient(
        self, *arguments: str | Path, secs: float = COMMAND_SECS, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs `gradient`; a traceback is nobody's expected answer."""
        done = subprocess.run(
            [program("gradient"), *map(str, arguments)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=secs,
            check=False,
            env={**self.environment(), **environment},
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def gradient_json(self, *arguments: str | Path, code: int = 0) -> Json:
        """What it prints with `--json`."""
        done = self.gradient(*arguments, "--json")
        assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr)
        answer: Json = json.loads(done.stdout)
        return answer

    def submit(self, tree: Path, *more: str) -> str:
        """Submits a source tree and returns the evaluation's id."""
        answer: str = self.gradient_json("build", tree, "--detach", *more)["evaluation"]
        return answer

    def log_of(self, job: str) -> bytes:
        """What `gradient logs` prints."""
        done = subprocess.run(
            [program("gradient"), "logs", job],
            capture_output=True,
            timeout=COMMAND_SECS,
            check=False,
            env=self.environment(),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    # The API

    def get(self, path: str) -> Json:
        """The JSON at `path`."""
        answer = self._api.get(path)
        assert answer.is_success, answer.text
        content: Json = answer.json()
        return content

    def post(self, path: str, body: Json) -> Json:
        """The JSON answer to `body`, sent with the server's key."""
        headers = {"Authorization": f"Bearer {self.key_file.read_text().strip()}"}
        answer = self._api.post(path, json=body, headers=headers)
        assert answer.is_success, answer.text
        content: Json = answer.json()
        return content

    def is_ready(self) -> bool:
        """What the server says of itself to whoever balances load."""
        return httpx2.get(f"{self.url}/readyz", timeout=30.0, trust_env=False).is_success

    def log_bytes(self, job: str) -> bytes:
        """What the server has of its log."""
        answer = self._api.get(f"/jobs/{job}/log")
        assert answer.is_success, answer.text
        return answer.content

    def log_size(self, job: str) -> int:
        """How many bytes that are."""
        return len(self.log_bytes(job))

    def evaluation(self, evaluation: str) -> Json:
        """The evaluation as it stands."""
        return self.get(f"/evaluations/{evaluation}")

    def ended(self, evaluation: str, *, secs: float = COMMAND_SECS) -> Json:
        """The evaluation once it has ended."""

        def final() -> Json | None:
            view = self.evaluation(evaluation)
            return view if view["status"] in FINAL else None

        return wait_until(f"the end of {evaluation}", final, secs=secs)

    def running(self, evaluation: str, name: str, *, secs: float = READY_SECS) -> Json:
        """A build of the evaluation once it is at a worker, which has said that it builds."""

        def build() -> Json | None:
            for entry in self.evaluation(evaluation)["builds"]:
                assert entry["name"] != name or entry["status"] not in FINAL, entry
                if entry["name"] == name and entry["stage"] == "Build":
                    found: Json = entry
                    return found
            return None

        return wait_until(f"{name} running", build, secs=secs)

    def tree(self, *builds: Build, top: str = "") -> Path:
        """A new source tree in the pool's directory."""
        self._trees += 1
        return write_tree(self.directory / f"tree-{self._trees}", *builds, top=top)

    def logs(self) -> str:
        """The end of every process's log."""
        parts = []
        for file in sorted([*self.directory.glob("*.log"), *self.directory.glob("*/runner/log")]):
            data = file.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
            parts.append(f"--- {file.relative_to(self.directory)}\n{data}")
        return "\n".join(parts)


def by_name(view: Json) -> dict[str, Json]:
    """The builds of an evaluation by name."""
    return {build["name"]: build for build in view["builds"]}
