"""Environments of processes in which something is altered before they begin (altered/sitecustomize.py)."""

from collections.abc import Mapping
from pathlib import Path

__all__ = ["BLOCK", "Wall", "altered"]

DIRECTORY = Path(__file__).parent / "altered"
BLOCK = "SIGRTMIN"


class Wall:
    """The wall clock of a host, which a test sets. The processes that read it are those of `altered`."""

    def __init__(self, file: Path, ahead_secs: float = 0.0) -> None:
        self.file = file
        self.set(ahead_secs)

    def set(self, ahead_secs: float) -> None:
        """From now on it is so far ahead of the true time."""
        # One write into the file that is open at its readers; of a fixed length, for it is not cut first.
        with self.file.open("r+" if self.file.exists() else "w") as writer:
            writer.write(f"{ahead_secs:<20.3f}")


def altered(
    *,
    wall: Wall | None = None,
    constants: Mapping[str, float] | None = None,
    block_secs: float | None = None,
    die_at: str | None = None,
) -> dict[str, str]:
    """`constants`: values by `module:NAME`; `block_secs`: how long the signal `BLOCK` blocks the loop.
    `die_at`: the process kills itself when it comes to this function, `module:Class.method`.
    """
    environment = {"PYTHONPATH": str(DIRECTORY)}
    if wall is not None:
        environment["GRADIENT_TEST_CLOCK"] = str(wall.file)
    if constants:
        environment["GRADIENT_TEST_CONSTANTS"] = ",".join(
            f"{name}={value}" for name, value in constants.items()
        )
    if block_secs is not None:
        environment["GRADIENT_TEST_BLOCK"] = str(block_secs)
    if die_at is not None:
        environment["GRADIENT_TEST_DIE_AT"] = die_at
    return environment
