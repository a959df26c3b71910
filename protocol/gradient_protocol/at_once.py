"""The short way to a bare socket.

A write through trio costs a turn of the scheduler even when the kernel has room, a read tries in vain
before it waits; at thousands of small messages a second over hundreds of sessions that is most of
what a message costs. So a write asks the kernel first, and only what it does not take goes the long
way; a read waits first. Every other kind of stream is used as it is.
"""

import os

import trio

__all__ = ["read_when_ready", "write_at_once"]


def write_at_once(stream: trio.abc.Stream, data: bytes) -> int:
    """How many bytes of `data` were written: 0 for a stream that is no bare socket, or one that is full.

    Nobody else may be sending on the stream. Raises trio.BrokenResourceError or ClosedResourceError.
    """
    if type(stream) is not trio.SocketStream:
        return 0
    try:
        return os.write(_descriptor(stream), data)
    except BlockingIOError:
        return 0
    except OSError as error:
        raise trio.BrokenResourceError(f"the socket is broken: {error}") from error


async def read_when_ready(stream: trio.abc.Stream, size: int) -> bytes | bytearray:
    """At most `size` bytes as soon as there are any, b"" at the end of the stream.

    One task at a time. Raises as `receive_some`.
    """
    if type(stream) is not trio.SocketStream:
        return await stream.receive_some(size)
    while True:
        await trio.lowlevel.wait_readable(_descriptor(stream))
        try:
            # Asked anew: the stream may have been closed since, and its number given to another.
            return os.read(_descriptor(stream), size)
        except BlockingIOError:
            continue
        except OSError as error:
            raise trio.BrokenResourceError(f"the socket is broken: {error}") from error


def _descriptor(stream: trio.SocketStream) -> int:
    descriptor = stream.socket.fileno()
    if descriptor < 0:
        raise trio.ClosedResourceError("this stream was closed")
    return descriptor
