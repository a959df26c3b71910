"""What the service manager hands to a service alone: files in `$CREDENTIALS_DIRECTORY` (systemd.exec(5))."""

from collections.abc import Mapping
from pathlib import Path

__all__ = ["find_credential", "is_credential"]


def find_credential(environment: Mapping[str, str], name: str) -> Path | None:
    """The file of that name, if the service was given one. It is the service's to read, whatever its mode."""
    directory = environment.get("CREDENTIALS_DIRECTORY")
    if not directory:
        return None
    file = Path(directory) / name
    return file if file.is_file() else None


def is_credential(environment: Mapping[str, str], file: Path) -> bool:
    """Whether `file` is one of them: who may read it is the service manager's affair, not its mode's."""
    directory = environment.get("CREDENTIALS_DIRECTORY")
    return bool(directory) and file.parent == Path(str(directory))
