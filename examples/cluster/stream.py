"""The stream that is measured: `serve HOST PORT_FILE`, or `measure HOST PORT SECS`, which prints JSON."""

import json
import socket
import socketserver
import sys
import time
from pathlib import Path

CHUNK = bytes(256 * 1024)
PATIENCE_SECS = 60


class Count(socketserver.BaseRequestHandler):
    """Reads until the client has sent all of it, and answers with the number of bytes."""

    def handle(self) -> None:
        """See above."""
        self.request.settimeout(PATIENCE_SECS)
        received = 0
        while data := self.request.recv(len(CHUNK)):
            received += len(data)
        self.request.sendall(str(received).encode())


def serve(host: str, port_file: str) -> None:
    """Serve on a port that the system chooses; the file has it, whole, once the server listens."""
    with socketserver.ThreadingTCPServer((host, 0), Count) as server:
        fresh = Path(port_file + ".new")
        fresh.write_text(str(server.server_address[1]))
        fresh.rename(port_file)
        server.serve_forever()


def measure(host: str, port: str, secs: str) -> None:
    """Send for so long, and print how fast it went."""
    with socket.create_connection((host, int(port)), PATIENCE_SECS) as stream:
        begun = time.monotonic()
        sent = 0
        while time.monotonic() - begun < float(secs):
            stream.sendall(CHUNK)
            sent += len(CHUNK)
        stream.shutdown(socket.SHUT_WR)
        received = int(stream.makefile().read())
        took_secs = time.monotonic() - begun
    if received != sent:
        sys.exit(f"sent {sent} bytes, of which {received} arrived")
    print(json.dumps({"bytes": sent, "secs": took_secs, "mbit_per_sec": sent * 8 / took_secs / 1e6}))


if __name__ == "__main__":
    {"serve": serve, "measure": measure}[sys.argv[1]](*sys.argv[2:])
