"""Between an agent and its server: passes every frame, but for the one that it is told to stop at."""

import contextlib
import socket
import threading
from pathlib import Path
from typing import Self

from tests.acceptance.processes import wait_until
from tests.fakes.cuts import describe, take_frames

__all__ = ["Relay"]

AT_ONCE_BYTES = 1 << 18


class Relay:
    """A Unix socket. Steps are named as `> UploadChunk` (from the agent) and `< NarPush` (to it)."""

    def __init__(self, path: Path, server: Path) -> None:
        self.url = f"unix://{path}"
        self._server = server
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._step: str | None = None
        self._behind: str | None = None
        self._held = threading.Event()
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone does not wake whoever accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self.let_go()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def stop_at(self, step: str, *, behind: str | None = None) -> None:
        """Nothing passes any more from this step's frame on; of those that come after a frame `behind`."""
        self._held.clear()
        self._behind, self._step = behind, step

    def wait_stopped(self) -> None:
        """Returns once the frame came, which has not passed."""
        wait_until("the step to stop at", self._held.is_set)

    def let_go(self) -> None:
        """Every connection is broken, and what was held back is lost; new ones pass."""
        self._step = None
        with self._lock:
            broken, self._open = self._open, []
        for one in broken:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._held.clear()

    def _accept(self) -> None:
        while True:
            try:
                agent, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            with self._lock:
                self._open += [agent, server]
            try:
                server.connect(str(self._server))
            except OSError:
                agent.close()
                server.close()
                continue
            for direction, source, sink in ((">", agent, server), ("<", server, agent)):
                thread = threading.Thread(target=self._pump, args=(direction, source, sink))
                thread.start()
                self._threads.append(thread)

    def _pump(self, direction: str, source: socket.socket, sink: socket.socket) -> None:
        buffer = bytearray()
        with contextlib.suppress(OSError):
            while data := source.recv(AT_ONCE_BYTES):
                buffer += data
                for frame in take_frames(buffer):
                    if not self._held.is_set() and not self._stops(direction, frame):
                        sink.sendall(frame)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        source.close()

    def _stops(self, direction: str, frame: bytes) -> bool:
        step = f"{direction} {describe(frame).removeprefix('Zstd ')}"
        if self._step is None:
            return False
        if self._behind is not None:
            if step == self._behind:
                self._behind = None
            return False
        if step == self._step:
            self._held.set()
            return True
        return False
