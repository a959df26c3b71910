"""Fetching a Git source with the git program (messages.md, Job, evaluation: `{type: Git}`).

The clone is shallow where the remote allows to ask for the commit, runs no hook, asks no question,
and reads neither the user's nor the host's configuration. Submodules are not fetched.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import trio
from gradient_protocol import nar
from gradient_protocol.store_paths import source_path

from gradient_worker.stores.base import PathInfo, Store

__all__ = ["GitError", "fetch_git", "register_source"]

_REV = re.compile(r"[0-9A-Za-z_][0-9A-Za-z._/+-]{0,254}")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_SCHEMES = ("https://", "http://", "ssh://", "git://", "file://")
_MAX_ERROR_CHARS = 2000


class GitError(Exception):
    """A source that cannot be fetched. One clear line without credentials.

    `permanent`: asking again would give the same (no such commit, no URL), as far as can be told.
    """

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


@dataclass(frozen=True, slots=True)
class _Repository:
    directory: Path

    async def run(self, *arguments: str) -> str:
        """Run git here; returns its standard output. Cancelling ends the program."""
        try:
            done = await trio.run_process(
                ["git", *arguments],
                cwd=self.directory,
                env=_environment(),
                stdin=b"",
                capture_stdout=True,
                capture_stderr=True,
                check=False,
            )
        except FileNotFoundError:
            raise GitError("the git program is not installed on this worker", permanent=False) from None
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-_MAX_ERROR_CHARS:]
            line = " / ".join(part.strip() for part in said.splitlines() if part.strip())
            message = f"git {arguments[0]} failed: {without_credentials(line)}"
            raise GitError(message, permanent=False)
        return done.stdout.decode(errors="replace").strip()


async def fetch_git(url: str, rev: str | None, destination: Path) -> str:
    """Put the tree of `rev` (a commit, branch or tag; None: the default branch) at `destination`.

    `destination` must not exist; its parent must. Returns the commit's id. The caller removes the
    tree when it is done with it, and after an error.
    """
    if not url.startswith(_SCHEMES):
        schemes = ", ".join(_SCHEMES)
        message = f"{without_credentials(url)!r:.100} is no URL of a repository ({schemes})"
        raise GitError(message, permanent=True)
    if rev is not None and (not _REV.fullmatch(rev) or ".." in rev):
        raise GitError(f"{rev!r:.100} is no commit, branch or tag", permanent=True)
    await trio.to_thread.run_sync(destination.mkdir)
    repository = _Repository(destination)
    await repository.run("init", "--quiet", "--template=", ".")
    await _fetch(repository, url, rev)
    commit = await repository.run("rev-parse", "--verify", "HEAD^{commit}")
    await trio.to_thread.run_sync(nar.remove_tree, destination / ".git")
    return commit


async def _fetch(repository: _Repository, url: str, rev: str | None) -> None:
    wanted = rev or "HEAD"
    try:
        await repository.run("fetch", "--quiet", "--depth=1", "--no-tags", "--", url, wanted)
        await repository.run("checkout", "--quiet", "--detach", "FETCH_HEAD")
    except GitError:
        # Not every server gives a commit by its id: then everything has to come.
        if rev is None or not _COMMIT.fullmatch(rev):
            raise
        refs = ["+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*"]
        await repository.run("fetch", "--quiet", "--", url, *refs)
        try:
            await repository.run("checkout", "--quiet", "--detach", rev, "--")
        except GitError:
            raise GitError(f"the repository has no commit {rev}", permanent=True) from None


def register_source(store: Store, tree: Path) -> PathInfo:
    """Move a fetched tree into the store, under the path that an upload of it would have. In a thread."""
    hasher = nar.NarHasher()
    for piece in nar.pack(tree):
        hasher.feed(piece)
    return store.register_output(source_path(hasher.hash), tree, ())


def without_credentials(text: str) -> str:
    """`text` with the user and password of every URL in it left out."""
    return _CREDENTIALS.sub("***@", text)


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "SSH_AUTH_SOCK") if name in os.environ}
    return {
        **kept,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "true",
        "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",
        "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file",
        "LC_ALL": "C",
    }
