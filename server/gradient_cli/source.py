"""What `gradient build PATH` uploads: what git would track, without git everything."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradient_protocol.nar import NarError, NarHasher, compress, pack_tree

from gradient_cli.api import Api
from gradient_cli.errors import CommandError, ExitCode

__all__ = ["SourceTree", "upload"]


@dataclass(frozen=True, slots=True)
class SourceTree:
    """A directory and the files of it that count, relative and sorted."""

    root: Path
    files: tuple[str, ...]

    @classmethod
    def at(cls, path: Path) -> "SourceTree":
        """The source tree at `path`. CommandError where there is none."""
        root = path.resolve()
        if not root.is_dir():
            raise CommandError(f"{path} is not a directory: name the one with gradient.toml", ExitCode.USAGE)
        files = tuple(sorted(_tracked(root)))
        if "gradient.toml" not in files:
            hint = "it is ignored by git" if (root / "gradient.toml").exists() else "there is none"
            raise CommandError(f"{path} has no gradient.toml to build: {hint}", ExitCode.USAGE)
        return cls(root, files)

    def pack(self) -> Iterator[bytes]:
        """The tree as a NAR."""
        return pack_tree(self.root, self.files)


def _tracked(root: Path) -> Iterator[str]:
    listed = _ask_git(root)
    if listed is None:
        for path in root.rglob("*"):
            if path.is_symlink() or path.is_file():
                yield str(path.relative_to(root))
        return
    for name in listed:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            # A submodule is listed by its directory.
            yield from (f"{name.rstrip('/')}/{inner}" for inner in _tracked(path))
        elif path.is_symlink() or path.exists():
            yield name


def _ask_git(root: Path) -> list[str] | None:
    """The files git would track below `root`; None where git does not know the directory."""
    if shutil.which("git") is None:
        return None
    known = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--is-inside-work-tree"], capture_output=True, check=False
    )
    if known.returncode != 0:
        return None
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"],
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        raise CommandError(f"git cannot list {root}: {listed.stderr.decode(errors='replace').strip()}")
    return [name for name in listed.stdout.decode(errors="surrogateescape").split("\0") if name]


def upload(api: Api, tree: SourceTree, project: str) -> str:
    """Uploads the tree unless the server holds it. Returns its store path."""
    try:
        hasher = NarHasher()
        for chunk in tree.pack():
            hasher.feed(chunk)
        held = api.find("/sources", project=project, nar_hash=hasher.hash)
        if held is not None:
            return str(held["path"])
        answer = api.upload(
            "/sources",
            compress(tree.pack()),
            project=project,
            nar_hash=hasher.hash,
            nar_size=hasher.size,
        )
    except OSError as error:
        raise CommandError(
            f"cannot read the source tree: {error.filename}: {error.strerror}", ExitCode.USAGE
        ) from None
    except NarError as error:
        raise CommandError(f"the source tree cannot be packed: {error}", ExitCode.USAGE) from None
    return str(answer["path"])
