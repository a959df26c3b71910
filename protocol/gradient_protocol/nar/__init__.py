"""The NAR archive: writing, reading, unpacking, and taking one in from the wire.

Streaming throughout: no function holds a whole archive. Nothing here needs an event loop; what
touches files is meant to run in a thread.

Layout of an archive (all strings are a 64-bit little-endian length, the bytes, and zeros up to a
multiple of 8)::

    "nix-archive-1" node
    node  = "(" "type" kind ")"
    kind  = "regular" ["executable" ""] "contents" bytes
          | "symlink" "target" bytes
          | "directory" ("entry" "(" "name" bytes "node" node ")")*    names strictly ascending
"""

from gradient_protocol.nar.digest import HASH_CHARS, NarHasher, ReferenceScanner
from gradient_protocol.nar.layout import NarError
from gradient_protocol.nar.read import (
    BeginDirectory,
    BeginFile,
    EndDirectory,
    EndFile,
    FileData,
    NarEvent,
    NarReader,
    Symlink,
)
from gradient_protocol.nar.transfer import NarIntake, NarVerifier, Sink, compress
from gradient_protocol.nar.unpack import Unpacker, remove_tree
from gradient_protocol.nar.write import pack, pack_tree

__all__ = [
    "HASH_CHARS",
    "BeginDirectory",
    "BeginFile",
    "EndDirectory",
    "EndFile",
    "FileData",
    "NarError",
    "NarEvent",
    "NarHasher",
    "NarIntake",
    "NarReader",
    "NarVerifier",
    "ReferenceScanner",
    "Sink",
    "Symlink",
    "Unpacker",
    "compress",
    "pack",
    "pack_tree",
    "remove_tree",
]
