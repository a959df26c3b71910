"""The frame inspector: `python -m gradient_protocol.inspect [--sizes] FILE` (`-` for standard input).

Reads one direction of a recorded stream with the msgpack package, without our schema, so that it
shows what was really sent, messages that we refuse included. A line a frame: its place in the file,
its length, its type, its fields. A stream may end in the middle; tokens and signed URLs are not shown.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

import msgpack
import zstandard

from gradient_protocol.limits import LENGTH_BYTES, MAX_ELEMENTS, MAX_MESSAGE

__all__ = ["Frame", "describe", "main", "read_frames"]

_SHOWN_CHARACTERS: Final = 200  # of one text or number of elements; the rest is counted
_SHOWN_ELEMENTS: Final = 20
_SECRETS: Final = frozenset({"tokens", "headers"})
_URLS: Final = frozenset({"url", "urls"})


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stream. `problem` is set, and `value` None, where it cannot be read."""

    position: int  # of its length, in bytes
    length: int  # of its payload
    value: object = None
    problem: str | None = None


def read_frames(stream: IO[bytes]) -> Iterator[Frame]:
    """The frames of a stream, the last one perhaps cut. Holds one frame at a time."""
    position = 0
    while head := stream.read(LENGTH_BYTES):
        length = int.from_bytes(head, "big")
        if len(head) < LENGTH_BYTES:
            yield Frame(position, 0, problem=f"the stream ends after {len(head)} bytes of a length")
            return
        if length > MAX_MESSAGE:
            yield Frame(
                position, length, problem=f"over the limit of {MAX_MESSAGE} bytes; nothing after it is read"
            )
            return
        payload = stream.read(length)
        if len(payload) < length:
            yield Frame(position, length, problem=f"the stream ends after {len(payload)} of its bytes")
            return
        yield _decode(position, payload)
        position += LENGTH_BYTES + length


def _decode(position: int, payload: bytes) -> Frame:
    try:
        value = _unpack(payload)
        if isinstance(value, dict) and value.get("type") == "Zstd" and isinstance(value.get("data"), bytes):
            value = {"type": "Zstd", "inside": _unpack(_decompress(value["data"]))}
    except (ValueError, TypeError, msgpack.UnpackException, zstandard.ZstdError, RecursionError) as error:
        reason = " ".join(str(error).split())[:_SHOWN_CHARACTERS] or type(error).__name__
        return Frame(position, len(payload), problem=f"not readable: {reason}")
    return Frame(position, len(payload), value)


def _unpack(payload: bytes) -> object:
    value: object = msgpack.unpackb(
        payload, strict_map_key=False, max_array_len=MAX_ELEMENTS, max_map_len=MAX_ELEMENTS
    )
    return value


def _decompress(data: bytes) -> bytes:
    with zstandard.ZstdDecompressor(max_window_size=2 * MAX_MESSAGE).stream_reader(data) as reader:
        return reader.read(MAX_MESSAGE)


def describe(frame: Frame, *, sizes_only: bool = False) -> str:
    """One line without secrets."""
    start = f"{frame.position:>10} {frame.length:>8}"
    if frame.problem is not None:
        return f"{start} !! {frame.problem}"
    if not isinstance(frame.value, dict):
        return f"{start} !! no map: {_shown(frame.value)}"
    fields = dict(frame.value)
    kind = fields.pop("type", None)
    if kind == "Zstd" and isinstance(fields.get("inside"), dict):
        fields = dict(fields["inside"])
        kind = f"{fields.pop('type', None)} (Zstd)"
    if sizes_only:
        return f"{start} {kind}"
    return f"{start} {kind} {json.dumps(_shown(fields), ensure_ascii=False)}"


def _shown(value: object, key: object = None) -> Any:  # noqa: ANN401 - anything that JSON can say
    """`value` shortened, and without what is secret under `key`."""
    if isinstance(value, dict):
        if key in _SECRETS:
            return {str(name): "(hidden)" for name in value}
        return {str(name): _shown(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        shown = [_shown(inner, key) for inner in value[:_SHOWN_ELEMENTS]]
        more = len(value) - len(shown)
        return [*shown, f"... {more} more"] if more else shown
    if key in _SECRETS:
        return "(hidden)"
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    if isinstance(value, str):
        text = _without_query(value) if key in _URLS else value
        more = len(text) - _SHOWN_CHARACTERS
        return text if more <= 0 else f"{text[:_SHOWN_CHARACTERS]}... {more} more"
    if value is None or isinstance(value, bool | int | float):
        return value
    return repr(value)  # an ext type


def _without_query(url: str) -> str:
    """A signed URL's secrets stand in its query and its user."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "(hidden)"
    hidden = "?(hidden)" if parts.query else ""
    return f"{parts.scheme}://{host}{port}{parts.path}{hidden}"


def main(arguments: list[str] | None = None) -> int:
    """Prints a stream's frames. 0 when all could be read, 1 when not, 2 for a file that cannot be opened."""
    parser = argparse.ArgumentParser(prog="python -m gradient_protocol.inspect", description=__doc__)
    parser.add_argument("file", help="one direction of a recorded stream, - for standard input")
    parser.add_argument("--sizes", action="store_true", help="places, lengths and types alone")
    options = parser.parse_args(arguments)
    try:
        if options.file == "-":
            return _print(sys.stdin.buffer, sizes_only=options.sizes)
        with Path(options.file).open("rb") as stream:
            return _print(stream, sizes_only=options.sizes)
    except BrokenPipeError:
        return 0  # the reader has seen enough
    except OSError as error:
        sys.stderr.write(f"{options.file}: {error.strerror or error}\n")
        return 2


def _print(stream: IO[bytes], *, sizes_only: bool) -> int:
    status = 0
    for found in read_frames(stream):
        sys.stdout.write(describe(found, sizes_only=sizes_only) + "\n")
        if found.problem is not None:
            status = 1
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
