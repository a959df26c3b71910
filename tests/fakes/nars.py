"""NARs of small trees, for tests."""

from pathlib import Path

from gradient_protocol.nar import pack

from tests.fakes.server import Stored

__all__ = ["stored_file", "stored_tree"]


def stored_tree(root: Path, *references: str) -> Stored:
    """What a server holds of the tree at `root`."""
    return Stored(b"".join(pack(root)), references)


def stored_file(scratch: Path, contents: bytes, *references: str) -> Stored:
    """What a server holds of a single file."""
    file = scratch / "stored-file"
    file.unlink(missing_ok=True)
    file.write_bytes(contents)
    return stored_tree(file, *references)
