"""`gradient-worker doctor`: what keeps this host from working as it should, one line each with the remedy."""

import os
import shutil
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio
from gradient_protocol.address import CredentialsError, connect, parse_address
from gradient_protocol.codec import Side
from gradient_protocol.connection import Connection
from gradient_protocol.counting import counted
from gradient_protocol.errors import ProtocolError, SessionClosed
from gradient_protocol.handshake import HandshakeOutcome, Rejected, handshake_as_worker
from gradient_protocol.ids import IdSource
from gradient_protocol.limits import PROTO_VERSION
from gradient_protocol.messages.shapes import Capabilities
from gradient_protocol.messages.worker import InitConnection

from gradient_worker.app import client_tls
from gradient_worker.config import WorkerConfig
from gradient_worker.connector import REMEDIES, one_line
from gradient_worker.identity import IdentityError, load_or_make_worker_id, read_peers
from gradient_worker.meters.cgroup import probe
from gradient_worker.runner import client as runner_client
from gradient_worker.runner.values import RunnerInfo
from gradient_worker.stores.base import StoreError
from gradient_worker.stores.directory import DirectoryStore
from gradient_worker.timing import CONNECT_SECS

__all__ = ["Finding", "examine"]

LOW_DISK_BYTES: Final = 1024**3
CLOCK_OFF_SECS: Final = 5.0
ALREADY_CONNECTED: Final = 496
CGROUP_REMEDY: Final = "run the runner in a unit with Delegate=yes, or name one by worker.build.cgroup"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `remedy` where something is wrong; a warning (`failed` False) does not keep builds out."""

    subject: str
    text: str
    remedy: str | None = None
    failed: bool = False

    def __str__(self) -> str:
        word = "ok" if self.remedy is None else "FAIL" if self.failed else "warn"
        remedy = "" if self.remedy is None else f"; {self.remedy}"
        return f"{word:<4} {self.subject}: {self.text}{remedy}"


def _fail(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, text, remedy, failed=True)


UNKNOWN_CLOCK: Final = Finding(
    "clock", "not compared: a server tells its time to whom it knows alone", "first get the token accepted"
)


async def examine(config: WorkerConfig) -> list[Finding]:
    """All findings, in a fixed order. Changes nothing but a worker id that was never made."""
    checks: tuple[Callable[[WorkerConfig], Awaitable[list[Finding]]], ...] = (
        _cgroup,
        _build_users,
        _store,
        _disk,
        _server_and_token,
    )
    findings: list[Finding] = []
    for check in checks:
        findings += await check(config)
    return findings


async def _cgroup(config: WorkerConfig) -> list[Finding]:
    runner = await runner_client.connect(config.base_dir)
    if runner is None:
        found = probe(config.build_cgroup)
        usable, reason = found.delegated is not None, found.reason
    else:
        info = await _ask(runner)
        usable, reason = bool(info.cgroups), info.cgroup_reason
    if usable:
        return [Finding("cgroup", reason)]
    return [Finding("cgroup", f"builds are not measured: {reason}", CGROUP_REMEDY)]


async def _ask(runner: runner_client.RunnerClient) -> RunnerInfo:
    async with trio.open_nursery() as nursery:
        await nursery.start(runner.run)
        info = await runner.info()
        nursery.cancel_scope.cancel()
    return info


async def _build_users(config: WorkerConfig) -> list[Finding]:
    del config
    if os.getuid() != 0:
        text = "builds run as the worker's own user and can read its tokens"
        return [Finding("build users", text, "run the runner as root with users gradient-build-1 to N")]
    try:
        import pwd  # noqa: PLC0415 - Unix alone

        pwd.getpwnam("gradient-build-1")
    except KeyError:
        text = "there is no user gradient-build-1, so builds run as root"
        return [Finding("build users", text, "make them: systemd-sysusers systemd/gradient.sysusers.conf")]
    return [Finding("build users", "builds run as users of their own")]


async def _store(config: WorkerConfig) -> list[Finding]:
    try:
        store = await trio.to_thread.run_sync(DirectoryStore.open, config.base_dir)
    except StoreError as error:
        if "another worker" in str(error):
            return [Finding("store", f"{config.base_dir}/store is in use by a running agent")]
        return [_fail("store", str(error), "restore it, or move it away to begin with an empty one")]
    except OSError as error:
        text = f"{error.filename}: {os.strerror(error.errno or 0)}"
        return [_fail("store", text, "give worker.baseDir a directory that this user may write")]
    paths = len(store.paths())
    await trio.to_thread.run_sync(store.close)
    return [Finding("store", f"{store.directory} holds {counted(paths, 'path')}")]


async def _disk(config: WorkerConfig) -> list[Finding]:
    try:
        usage = await trio.to_thread.run_sync(shutil.disk_usage, config.base_dir)
    except OSError as error:
        return [_fail("disk", f"{config.base_dir}: {os.strerror(error.errno or 0)}", "make worker.baseDir")]
    text = f"{usage.free / 1024**3:.1f} GiB free below {config.base_dir}"
    if usage.free < LOW_DISK_BYTES:
        return [_fail("disk", text, "free some, or set worker.storeMaxBytes")]
    return [Finding("disk", text)]


async def _server_and_token(config: WorkerConfig) -> list[Finding]:
    try:
        address = parse_address(config.server_url)
        worker_id = load_or_make_worker_id(config.base_dir, IdSource().new)
        tokens = read_peers(config.peers_file).tokens
    except ValueError as error:
        return [_fail("server", str(error), "correct worker.serverUrl")]
    except IdentityError as error:
        return [_fail("token", str(error), "then run doctor again")]
    try:
        with trio.fail_after(CONNECT_SECS):
            stream = await connect(address, client_tls(config))
    except CredentialsError as error:
        return [_fail("server", str(error), "correct worker.serverCaFile")]
    except ssl.SSLError as error:
        return [_fail("server", one_line(error), "see worker.serverCaFile and worker.serverFingerprint")]
    except (OSError, trio.TooSlowError) as error:
        text = f"cannot connect to {address}: {one_line(error)}"
        return [_fail("server", text, "is it up, and is worker.serverUrl right?")]
    reached = Finding("server", f"{address} answers")
    if not tokens:
        command = f"gradient worker register {config.name} --worker-id {worker_id}"
        await trio.aclose_forcefully(stream)
        missing = _fail("token", f"{config.peers_file} holds none", f"{command} prints the line")
        return [reached, missing, UNKNOWN_CLOCK]
    hello = InitConnection(
        version=PROTO_VERSION,
        worker_id=worker_id,
        name=config.name,
        incarnation=IdSource().new(),
        capabilities=Capabilities(fetch=False, eval=False, build=False, zstd=True),
    )
    return [reached, *await _try_token(stream, hello, dict(tokens))]


async def _try_token(stream: trio.abc.Stream, hello: InitConnection, tokens: dict[str, str]) -> list[Finding]:
    connection = Connection(stream, Side.WORKER)
    outcome: HandshakeOutcome | Rejected | None = None
    began = time.time()
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(connection.run)
            try:
                outcome = await handshake_as_worker(connection, hello, tokens)
            except (ProtocolError, SessionClosed) as error:
                text = f"the handshake failed: {error}"
                return [_fail("token", text, "is it a gradient server of this version?"), UNKNOWN_CLOCK]
            finally:
                nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await connection.aclose()
    ended = time.time()
    if isinstance(outcome, Rejected):
        if outcome.code == ALREADY_CONNECTED:
            connected = Finding("token", "accepted; the agent of this worker is connected")
            return [connected, Finding("clock", "its agent keeps it by the server's; not compared here")]
        remedy = REMEDIES.get(outcome.code, "see the server's log")
        return [_fail("token", f"refused, {outcome.code}: {outcome.reason}", remedy), UNKNOWN_CLOCK]
    accepted = Finding("token", f"accepted for {', '.join(outcome.authorized_peers)}")
    return [accepted, _clock(outcome.server_time - (began + ended) / 2)]


def _clock(off_secs: float) -> Finding:
    text = f"{abs(off_secs):.1f} s {'behind' if off_secs > 0 else 'ahead of'} the server's"
    if abs(off_secs) > CLOCK_OFF_SECS:
        return _fail("clock", text, "synchronise this host's clock (timedatectl set-ntp true)")
    return Finding("clock", text)
