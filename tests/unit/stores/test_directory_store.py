"""The directory store: what becomes valid, when, and what is left of everything else."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gradient_protocol.kinds import Compression
from gradient_protocol.nar import NarError, NarHasher, compress, pack
from gradient_worker.stores import directory as directory_module
from gradient_worker.stores import packed
from gradient_worker.stores import registry as registry_module
from gradient_worker.stores.base import BadOutputError, PathInfo, StoreError
from gradient_worker.stores.directory import DirectoryStore


def store_path(letter: str, name: str = "thing-1.0") -> str:
    return f"{letter * 32}-{name}"


A, B, C = (store_path(letter) for letter in "abc")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def store(tmp_path: Path):  # noqa: ANN201 - a generator of DirectoryStore
    opened = DirectoryStore.open(tmp_path / "worker", clock=Clock())
    yield opened
    opened.close()


def build(tmp_path: Path, name: str = "out", text: str = "text") -> Path:
    built = tmp_path / "built" / name
    built.mkdir(parents=True)
    (built / "file").write_text(text)
    (built / "run").write_text("#!/bin/sh\n")
    (built / "run").chmod(0o755)
    return built


def described(path: Path) -> tuple[str, int, bytes]:
    archive = b"".join(pack(path))
    hasher = NarHasher()
    hasher.feed(archive)
    return hasher.hash, hasher.size, archive


def receive(store: DirectoryStore, path: str, tree: Path, references: tuple[str, ...] = ()) -> PathInfo:
    nar_hash, nar_size, archive = described(tree)
    receiver = store.receive(path, nar_hash, nar_size, references, Compression.ZSTD)
    for piece in compress([archive]):
        receiver.feed(piece)
    return receiver.commit()


def names(store: DirectoryStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def test_an_output_is_moved_in_canonicalised_and_described(store: DirectoryStore, tmp_path: Path) -> None:
    built = build(tmp_path, text=f"uses {A[:32]} and itself {B[:32]}")
    info = store.register_output(B, built, [A, C])
    assert info.references == (A, B)
    assert not info.contains_store_dir
    assert (info.nar_hash, info.nar_size) == described(store.real_path(B))[:2]
    assert store.info(B) == info
    assert store.held_bytes == info.nar_size
    assert not built.exists()
    assert {oct(p.stat().st_mode & 0o7777) for p in (store.real_path(B), store.real_path(B) / "run")} == {
        "0o555"
    }
    assert (store.real_path(B) / "file").stat().st_mode & 0o7777 == 0o444
    assert {p.lstat().st_mtime for p in [store.real_path(B), *store.real_path(B).rglob("*")]} == {1.0}


def test_an_output_is_hashed_and_scanned_in_one_reading(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counting(path: Path) -> Iterator[bytes]:
        for piece in pack(path):
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(directory_module.nar, "pack", counting)
    built = build(tmp_path, text="x" * 3_000_000 + A[:32])
    info = store.register_output(B, built, [A, C])
    assert info.references == (A,)
    assert sum(read) == info.nar_size, "every byte once"
    assert max(read) <= 1024 * 1024, "and never all of them at once"


def test_a_small_output_that_was_just_packed_is_had_packed_once(
    store: DirectoryStore, tmp_path: Path
) -> None:
    info = store.register_output(A, build(tmp_path), [])
    pieces = store.take_packed(info)
    assert pieces is not None
    assert list(pieces) == list(store.pack(A))
    assert store.take_packed(info) is None, "it would stay for ever"
    large = store.register_output(B, build(tmp_path, "large", "x" * 100_000), [])
    assert store.take_packed(large) is None
    other = receive(store, C, store.real_path(A))
    assert store.take_packed(other) is None, "what came from the server is not about to be uploaded"


def test_few_outputs_are_kept_packed(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "KEPT_MAX", 2)
    infos = [store.register_output(path, build(tmp_path, path, text=path), []) for path in (A, B, C)]
    assert [store.take_packed(info) is None for info in infos] == [True, False, False]


def test_an_output_that_names_the_workers_directory_is_flagged(store: DirectoryStore, tmp_path: Path) -> None:
    built = build(tmp_path, text=f"#!{store.directory}/{A}/bin/tool")
    assert store.register_output(B, built, [A]).contains_store_dir


def test_a_hard_link_is_broken_before_its_mode_is_changed(store: DirectoryStore, tmp_path: Path) -> None:
    host_file = tmp_path / "host"
    host_file.write_text("of the host")
    host_file.chmod(0o640)
    built = build(tmp_path)
    os.link(host_file, built / "linked")
    store.register_output(A, built, [])
    assert host_file.stat().st_mode & 0o7777 == 0o640
    assert (store.real_path(A) / "linked").read_text() == "of the host"
    assert (store.real_path(A) / "linked").stat().st_nlink == 1


def test_whoever_is_killed_while_a_hard_link_is_copied_adds_nothing_to_the_output(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(tmp_path)
    os.link(built / "file", built / "linked")
    before = sorted(entry.name for entry in built.iterdir())

    def die(_fd: int, _data: memoryview) -> int:
        raise SystemExit

    for pid in (os.getpid(), os.getpid(), 2**22):  # the next agent may have the same one, in a container
        with monkeypatch.context() as broken:
            broken.setattr("gradient_worker.stores.canonical.os.getpid", lambda pid=pid: pid)
            broken.setattr("gradient_worker.stores.canonical.os.write", die)
            with pytest.raises(SystemExit):
                store.register_output(A, built, [])
        assert sorted(entry.name for entry in built.iterdir()) == before
    store.register_output(A, built, [])
    assert sorted(entry.name for entry in store.real_path(A).iterdir()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_a_build_user_owns_becomes_the_workers(store: DirectoryStore, tmp_path: Path) -> None:
    built = build(tmp_path)
    (built / "link").symlink_to("file")
    subprocess.run(["chown", "-Rh", "65534:65534", built], check=True)
    store.register_output(A, built, [])
    owners = {p.lstat().st_uid for p in [store.real_path(A), *store.real_path(A).rglob("*")]}
    assert owners == {0}


def test_a_missing_and_a_special_file_are_the_builds_fault(store: DirectoryStore, tmp_path: Path) -> None:
    with pytest.raises(BadOutputError, match=f"the build did not make {A}"):
        store.register_output(A, tmp_path / "nothing", [])
    built = build(tmp_path)
    os.mkfifo(built / "pipe")
    with pytest.raises(BadOutputError, match=r"'pipe' is neither"):
        store.register_output(A, built, [])
    assert store.info(A) is None
    assert names(store) == []


@pytest.mark.parametrize("kind", ["file", "symlink"])
def test_an_output_need_not_be_a_directory(store: DirectoryStore, tmp_path: Path, kind: str) -> None:
    built = tmp_path / "out"
    built.write_text("x") if kind == "file" else built.symlink_to("y")
    store.register_output(A, built, [])
    assert os.path.lexists(store.real_path(A))


def test_a_received_path_is_valid_only_after_its_commit(store: DirectoryStore, tmp_path: Path) -> None:
    tree = build(tmp_path)
    nar_hash, nar_size, archive = described(tree)
    receiver = store.receive(A, nar_hash, nar_size, [B], Compression.NONE)
    receiver.feed(archive)
    assert store.info(A) is None
    assert not store.real_path(A).exists()
    assert receiver.commit() == PathInfo(A, nar_hash, nar_size, (B,))
    receiver.abort()
    assert b"".join(store.pack(A)) == archive
    assert names(store) == [A]


@pytest.mark.parametrize("damage", ["flip", "cut", "more"])
def test_a_damaged_nar_leaves_nothing(store: DirectoryStore, tmp_path: Path, damage: str) -> None:
    nar_hash, nar_size, archive = described(build(tmp_path))
    wrong = {
        "flip": archive.replace(b"text", b"tixt"),
        "cut": archive[:-8],
        "more": archive + bytes(8),
    }[damage]
    receiver = store.receive(A, nar_hash, nar_size, [], Compression.NONE)

    def take_in() -> None:
        receiver.feed(wrong)
        receiver.commit()

    with pytest.raises(NarError):
        take_in()
    receiver.abort()
    assert store.info(A) is None
    assert names(store) == []


def test_a_path_that_is_none_is_refused_before_anything_is_written(store: DirectoryStore) -> None:
    for path in ("../../etc/passwd", A + "/../x", "short-name", A[:32], f"{'e' * 32}-name", A + "\n"):
        with pytest.raises(StoreError, match="not a store path"):
            store.receive(path, "sha256:0", 1, [], Compression.NONE)
    assert names(store) == []


def test_the_same_contents_again_change_nothing(store: DirectoryStore, tmp_path: Path) -> None:
    first = store.register_output(A, build(tmp_path, "one"), [])
    inode = store.real_path(A).stat().st_ino
    assert store.register_output(A, build(tmp_path, "two"), []) is first
    assert receive(store, A, build(tmp_path, "three")) is first
    assert store.real_path(A).stat().st_ino == inode
    assert names(store) == [A]


def test_other_contents_take_the_place_of_the_held_ones(store: DirectoryStore, tmp_path: Path) -> None:
    store.register_output(A, build(tmp_path, "one", "failed attempt"), [])
    info = receive(store, A, build(tmp_path, "two", "good"))
    assert store.info(A) == info
    assert (store.real_path(A) / "file").read_text() == "good"
    assert store.held_bytes == info.nar_size
    assert names(store) == [A]


def test_a_registration_that_fails_leaves_neither_path_nor_row(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, registration: object) -> None:
        raise registry_module.sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(registry_module.Registry, "put", full)
    with pytest.raises(StoreError, match="disk is full"):
        store.register_output(A, build(tmp_path), [])
    assert store.info(A) is None
    assert names(store) == []


def test_opening_again_finds_what_was_valid_and_removes_the_rest(tmp_path: Path) -> None:
    base = tmp_path / "worker"
    store = DirectoryStore.open(base)
    kept = store.register_output(A, build(tmp_path, "a"), [])
    store.register_output(B, build(tmp_path, "b"), [])
    receiver = store.receive(C, "sha256:0", 100, [], Compression.NONE)
    receiver.feed(described(store.real_path(A))[2][:100])
    (store.directory / C).mkdir()
    subprocess.run(["chmod", "-R", "u+w", store.real_path(B)], check=True)
    subprocess.run(["rm", "-r", store.real_path(B)], check=True)
    store.close()

    store = DirectoryStore.open(base)
    assert store.paths() == [A]
    assert store.info(A) == kept
    # Perhaps what a build had made; the next opening removes it.
    assert names(store) == [f".unregistered-{C[:32]}", A]
    store.close()
    store = DirectoryStore.open(base)
    assert names(store) == [A]
    store.close()
    receiver.abort()


def test_two_processes_cannot_have_one_store(tmp_path: Path) -> None:
    store = DirectoryStore.open(tmp_path)
    with pytest.raises(StoreError, match="another worker uses the store"):
        DirectoryStore.open(tmp_path)
    store.close()
    DirectoryStore.open(tmp_path).close()


def test_a_registry_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"not a database, but long enough to be looked at as one" * 50)
    with pytest.raises(StoreError, match="with it deleted the store starts empty"):
        DirectoryStore.open(tmp_path)
    (tmp_path / "store.db").unlink()
    DirectoryStore.open(tmp_path).close()


def test_after_a_restart_of_the_host_the_newest_paths_are_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    store = DirectoryStore.open(tmp_path / "worker", clock=clock)
    store.register_output(A, build(tmp_path, "a"), [])
    clock.now += 1000
    store.register_output(B, build(tmp_path, "b"), [])
    store.register_output(C, build(tmp_path, "c"), [])
    for path in (A, B):
        (store.real_path(path) / "file").chmod(0o644)
        (store.real_path(path) / "file").write_text("lost")
    store.close()

    other_boot = tmp_path / "boot_id"
    other_boot.write_text("another boot\n")
    monkeypatch.setattr("gradient_worker.stores.directory._BOOT_ID", other_boot)
    store = DirectoryStore.open(tmp_path / "worker", clock=clock)
    # A had long been written back when the host stopped, so it is not looked at.
    assert store.paths() == [A, C]
    assert names(store) == [A, C]
    store.close()


def test_what_was_registered_after_the_clock_was_set_back_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    store = DirectoryStore.open(tmp_path / "worker", clock=clock)
    store.register_output(A, build(tmp_path, "a"), [])
    clock.now -= 7200
    store.close()
    store = DirectoryStore.open(tmp_path / "worker", clock=clock)
    store.register_output(B, build(tmp_path, "b"), [])
    (store.real_path(B) / "file").chmod(0o644)
    (store.real_path(B) / "file").write_text("lost")
    store.close()
    other_boot = tmp_path / "boot_id"
    other_boot.write_text("another boot\n")
    monkeypatch.setattr("gradient_worker.stores.directory._BOOT_ID", other_boot)
    store = DirectoryStore.open(tmp_path / "worker", clock=clock)
    assert store.paths() == [A]
    store.close()


def test_listeners_hear_of_what_came_and_went_after_the_fact(store: DirectoryStore, tmp_path: Path) -> None:
    heard: list[tuple[str, bool]] = []
    stop = store.subscribe(lambda paths: heard.extend((path, store.info(path) is not None) for path in paths))
    store.register_output(A, build(tmp_path, "a"), [])
    store.register_output(A, build(tmp_path, "b"), [])
    store.collect_garbage(0)
    stop()
    store.register_output(B, build(tmp_path, "c"), [])
    assert heard == [(A, True), (A, False)]


def test_collection_removes_the_least_recently_used_and_never_what_is_pinned(
    store: DirectoryStore, tmp_path: Path
) -> None:
    store.register_output(A, build(tmp_path, "a"), [])
    store.register_output(B, build(tmp_path, "b", f"refers to {A[:32]}"), [A])
    store.register_output(C, build(tmp_path, "c"), [])
    size = sum(info.nar_size for path in (A, B, C) if (info := store.info(path)))
    store.pin("job", [B])
    assert store.collect_garbage(size).removed == ()
    report = store.collect_garbage(0)
    assert report.removed == (C,)
    assert report.freed_bytes + report.held_bytes == size
    assert names(store) == [A, B]
    store.unpin("job")
    assert store.collect_garbage(0).removed == (B, A)
    assert (store.held_bytes, names(store)) == (0, [])


def test_being_pinned_counts_as_use_and_outlives_the_process(tmp_path: Path) -> None:
    clock = Clock()
    store = DirectoryStore.open(tmp_path / "worker", clock=clock)
    for letter in "abc":
        store.register_output(store_path(letter), build(tmp_path, letter), [])
    store.pin("job", [A])
    store.unpin("job")
    store.close()
    store = DirectoryStore.open(tmp_path / "worker", clock=clock)
    assert store.collect_garbage(store.held_bytes - 1).removed == (B,)
    store.close()
