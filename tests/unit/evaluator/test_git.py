"""Fetching from a repository on this machine with the real git program."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gradient_protocol import nar
from gradient_worker.evaluator.git import GitError, fetch_git, register_source, without_credentials
from gradient_worker.stores.directory import DirectoryStore

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(repository: Path, *arguments: str) -> str:
    identity = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, **identity}
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=repository, env=env, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    git(path, "init", "--quiet", "--initial-branch=main")
    (path / "gradient.toml").write_text("# one\n")
    (path / "run").write_text("#!/bin/sh\n")
    (path / "run").chmod(0o755)
    (path / "link").symlink_to("run")
    git(path, "add", ".")
    git(path, "commit", "--quiet", "-m", "one")
    (path / "gradient.toml").write_text("# two\n")
    git(path, "commit", "--quiet", "-am", "two")
    return path


async def test_the_default_branch_a_branch_and_an_old_commit(repository: Path, tmp_path: Path) -> None:
    first, second = git(repository, "rev-parse", "HEAD~1", "HEAD").split()
    for name, rev, commit, text in (
        ("default", None, second, "# two\n"),
        ("branch", "main", second, "# two\n"),
        ("commit", first, first, "# one\n"),
    ):
        assert await fetch_git(f"file://{repository}", rev, tmp_path / name) == commit
        assert (tmp_path / name / "gradient.toml").read_text() == text
        assert not (tmp_path / name / ".git").exists()


async def test_a_commit_that_the_server_gives_only_with_everything(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What such a server answers, said by a program in git's place.
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    refusal = "error: Server does not allow request for unadvertised object"
    real = shutil.which("git")
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *--depth=1*) echo "{refusal}" >&2; exit 128;; esac\nexec {real} "$@"\n'
    )
    program.chmod(0o755)
    first = git(repository, "rev-parse", "HEAD~1")
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    assert await fetch_git(f"file://{repository}", first, tmp_path / "tree") == first
    with pytest.raises(GitError, match="does not allow"):
        await fetch_git(f"file://{repository}", "main", tmp_path / "other")


async def test_a_source_has_the_same_path_fetched_and_uploaded(repository: Path, tmp_path: Path) -> None:
    await fetch_git(f"file://{repository}", None, tmp_path / "tree")
    listed = git(repository, "ls-files").splitlines()
    hasher = nar.NarHasher()
    for piece in nar.pack_tree(repository, listed):
        hasher.feed(piece)
    store = DirectoryStore.open(tmp_path / "worker")
    info = register_source(store, tmp_path / "tree")
    assert (info.nar_hash, info.nar_size) == (hasher.hash, hasher.size)
    assert info.path.endswith("-source")
    assert (store.real_path(info.path) / "run").stat().st_mode & 0o777 == 0o555
    store.close()


@pytest.mark.parametrize(
    ("source", "words", "permanent"),
    [
        (("ext::sh -c touch% /tmp/x", None), "no URL of a repository", True),
        (("--upload-pack=touch", None), "no URL of a repository", True),
        (("file:///nowhere", "--orphan"), "no commit, branch or tag", True),
        (("file:///nowhere", "a..b"), "no commit, branch or tag", True),
        (("file:///nowhere", None), "git fetch failed", False),
        (("file://REPOSITORY", "no-such-branch"), "git fetch failed", False),
        (("file://REPOSITORY", "0" * 40), "has no commit", True),
    ],
)
async def test_what_cannot_be_fetched_is_one_clear_line(
    repository: Path, tmp_path: Path, source: tuple[str, str | None], words: str, permanent: bool
) -> None:
    with pytest.raises(GitError, match=words) as caught:
        await fetch_git(source[0].replace("REPOSITORY", str(repository)), source[1], tmp_path / "tree")
    assert caught.value.permanent is permanent
    assert "\n" not in str(caught.value)


async def test_a_hook_or_template_of_the_host_does_not_run(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = tmp_path / "template" / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "post-checkout").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (hooks / "post-checkout").chmod(0o755)
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(hooks.parent))
    await fetch_git(f"file://{repository}", None, tmp_path / "tree")
    assert not (tmp_path / "ran").exists()


def test_credentials_leave_no_message() -> None:
    assert (
        without_credentials("fatal: https://me:secret@x.example/r: no")
        == "fatal: https://***@x.example/r: no"
    )
