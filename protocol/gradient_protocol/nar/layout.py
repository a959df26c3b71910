"""Constants of the archive that its writer and its reader share, and the limits of both."""

__all__ = [
    "CHUNK_BYTES",
    "MAX_DEPTH",
    "MAX_NAME_BYTES",
    "MAX_TARGET_BYTES",
    "NarError",
    "padding",
    "show",
    "string",
]

# What one piece of an archive holds: large enough that per-piece costs vanish beside the hashing.
CHUNK_BYTES = 256 * 1024
# Linux' own NAME_MAX and PATH_MAX less its NUL: whatever is longer cannot be unpacked anyway.
MAX_NAME_BYTES = 255
MAX_TARGET_BYTES = 4095
# Each level costs an open descriptor while packing and unpacking.
MAX_DEPTH = 256

_ZEROS = (b"", *(bytes(count) for count in range(1, 8)))


class NarError(Exception):
    """An archive, or a tree to be archived, that is not acceptable. One clear line."""


def padding(size: int) -> bytes:
    """The zeros that follow `size` bytes."""
    return _ZEROS[-size % 8]


def string(text: bytes) -> bytes:
    """One string of the archive: length, bytes, padding."""
    return len(text).to_bytes(8, "little") + text + padding(len(text))


def show(name: bytes) -> str:
    """A name for a message: printable whatever bytes an attacker chose, and short."""
    text = name.decode(errors="backslashreplace")
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return repr(text if len(text) <= 80 else text[:77] + "...")
