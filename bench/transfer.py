"""NARs through upload and download, beside a bare zstd + socket copy of the same files in the same run.

    python -m bench.transfer [--mib 1024] [--at-once 1,4,16] [--rounds 1]

Half of the bytes are a few large files, half small ones of 16 KiB; half of every block compresses.
The server (sessions, scheduler, database, NAR store, no HTTP) is one process, the worker (store,
packing, compression, connection) a second, both as they run in earnest; a third asks for jobs all
the while and measures how long RequestJob waits for its AssignJob. One JSON line a case. MB/s are
10^6 bytes of archive a second; `of_bare` is the share of the bare copy's speed with as many streams
at once; peaks are resident MiB, and what they were before the case.
"""

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import zstandard

BLOCK_BYTES = 256 * 1024
SMALL_BYTES = 16 * 1024
PROBE_SECS = 4.0


def make_tree(root: Path, size_bytes: int, seed: int) -> None:
    """Two large files of a quarter each, the rest small ones, 100 a directory."""
    rng = random.Random(seed)
    text = b"".join(b"line %d of some text that compresses\n" % n for n in range(BLOCK_BYTES // 30))
    root.mkdir(parents=True)
    for n in range(2):
        with (root / f"large-{n}").open("wb") as file:
            for _ in range(size_bytes // 4 // BLOCK_BYTES):
                file.write(rng.randbytes(BLOCK_BYTES // 2))
                file.write(text[: BLOCK_BYTES // 2])
    for n in range(size_bytes // 2 // SMALL_BYTES):
        directory = root / f"d{n // 100:04d}"
        directory.mkdir(exist_ok=True)
        start = rng.randrange(len(text) - SMALL_BYTES)
        (directory / f"f{n:05d}").write_bytes(
            rng.randbytes(SMALL_BYTES // 2) + text[start : start + SMALL_BYTES // 2]
        )


class Part:
    """One of the processes; it takes and gives lines of JSON."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **question: object) -> dict[str, Any]:
        """Its answer to one line."""
        self.tell(**question)
        return self.answer()

    def tell(self, **question: object) -> None:
        """One line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """One line from it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended: {self._process.args!r}")
        found: dict[str, Any] = json.loads(line)
        return found

    def rss_mib(self, field: str = "VmRSS") -> float:
        """Resident memory now, or with `VmHWM` its peak since `reset_peak`."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith(field + ":")]
        return round(int(line.split()[1]) / 1024, 1)

    def reset_peak(self) -> None:
        """Measure the peak from here on."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def cpu_secs(self) -> float:
        """Processor time so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def bare_copy(trees: list[Path], target: Path) -> tuple[float, float, float]:
    """Files -> zstd -> socket -> zstd -> one file a tree: two processes, a thread a tree.

    Seconds, and processor seconds of the sender and of the receiver.
    """
    target.mkdir()
    pairs = [socket.socketpair() for _ in trees]
    started, before = time.perf_counter(), os.times()
    child = os.fork()
    if child == 0:
        try:
            for sender, _ in pairs:
                sender.close()
            _in_threads([lambda r=r, n=n: _receive(r, target / str(n)) for n, (_, r) in enumerate(pairs)])
        finally:
            os._exit(0)
    for _, receiver in pairs:
        receiver.close()
    _in_threads([lambda t=t, s=s: _send(t, s) for t, (s, _) in zip(trees, pairs, strict=True)])
    os.waitpid(child, 0)
    elapsed, after = time.perf_counter() - started, os.times()
    shutil.rmtree(target)
    sender_secs = after.user + after.system - before.user - before.system
    receiver_secs = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return elapsed, sender_secs, receiver_secs


def _in_threads(actions: list[Any]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _send(tree: Path, to: socket.socket) -> None:
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    for directory, _, names in os.walk(tree):
        for name in names:
            with (Path(directory) / name).open("rb", buffering=0) as file:
                while data := file.read(BLOCK_BYTES):
                    to.sendall(compressor.compress(data))
    to.sendall(compressor.flush())
    to.close()


def _receive(source: socket.socket, target: Path) -> None:
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    with target.open("wb", buffering=0) as file:
        while data := source.recv(BLOCK_BYTES):
            file.write(decompressor.decompress(data))


def move(kind: str, plan: dict[str, Any], parts: dict[str, Part]) -> dict[str, Any]:
    """One case: seconds, memory and processor time of both sides, and what RequestJob waited."""
    both = {name: parts[name] for name in ("server", "worker")}
    before = {name: part.rss_mib() for name, part in both.items()}
    cpu = {name: part.cpu_secs() for name, part in both.items()}
    for part in both.values():
        part.reset_peak()
    parts["probe"].tell(begin=True)
    done = parts["worker"].ask(kind=kind, **plan)
    parts["probe"].tell(end=True)
    result: dict[str, Any] = {"nar_mb_s": round(done["nar_bytes"] / 1e6 / done["secs"], 1), **done}
    for name, part in both.items():
        result[f"{name}_peak_mib"] = part.rss_mib("VmHWM")
        result[f"{name}_before_mib"] = before[name]
        result[f"{name}_cpu_secs"] = round(part.cpu_secs() - cpu[name], 2)
    return {**result, **parts["probe"].answer()}


def measure(base: Path, options: argparse.Namespace) -> None:
    """All cases, one JSON line each."""
    size_bytes = options.mib * 1024 * 1024
    with Part("bench.transfer_parts", "server", str(base / "server")) as server:
        known = server.answer()
        with (
            Part("bench.transfer_parts", "worker", str(base), json.dumps(known)) as worker,
            Part("bench.transfer_parts", "probe", json.dumps(known)) as probe,
        ):
            parts = {"server": server, "worker": worker, "probe": probe}
            worker.answer()
            first = 0
            for at_once in [int(text) for text in options.at_once.split(",")] * options.rounds:
                _cases(base, parts, size_bytes, at_once, first)
                first += at_once


def _cases(base: Path, parts: dict[str, Part], size_bytes: int, at_once: int, first: int) -> None:
    trees = [base / "trees" / str(first + n) for n in range(at_once)]
    for n, tree in enumerate(trees):
        make_tree(tree, size_bytes // at_once, first + n)
    bare_secs, *bare_cpu = bare_copy(trees, base / "bare")
    registered = parts["worker"].ask(kind="register", trees=[str(tree) for tree in trees], first=first)
    bare_mb_s = registered["nar_bytes"] / 1e6 / bare_secs
    bare = {"sender_cpu_secs": round(bare_cpu[0], 2), "receiver_cpu_secs": round(bare_cpu[1], 2)}
    print(json.dumps({"case": f"bare-{at_once}", "nar_mb_s": round(bare_mb_s, 1), **bare}), flush=True)
    parts["probe"].tell(begin=True)
    time.sleep(PROBE_SECS)
    parts["probe"].tell(end=True)
    print(json.dumps({"case": f"idle-{at_once}", **parts["probe"].answer()}), flush=True)
    for kind in ("upload", "download"):
        result = move(kind, {"first": first, "count": at_once}, parts)
        result["of_bare"] = round(result["nar_mb_s"] / bare_mb_s, 2)
        result["load"] = os.getloadavg()[0]
        print(json.dumps({"case": f"{kind}-{at_once}", **result}), flush=True)


def main() -> None:
    """Parses and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="MiB of files a case")
    parser.add_argument("--at-once", default="1,4,16", help="how many paths they are divided into")
    parser.add_argument("--dir", help="where to put the files: on tmpfs the disk's own cost stays out")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gradient-bench-", dir=options.dir) as base:
        try:
            measure(Path(base), options)
        finally:
            for directory, _, _ in os.walk(base):
                Path(directory).chmod(0o700)  # a store's directories are read-only


if __name__ == "__main__":
    main()
