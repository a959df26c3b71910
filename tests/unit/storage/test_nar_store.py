"""The NAR store: verified, whole or absent, resumable, shared by content, clean on a full disk."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from gradient_protocol.kinds import Compression
from gradient_protocol.nar import NarError, NarHasher, compress, pack
from gradient_server.storage import durable, nar_store
from gradient_server.storage.nar_store import (
    LocalNarStore,
    ObjectMissingError,
    StorageFullError,
    StoredObject,
    UploadGapError,
    WriterClosedError,
)


class Nar:
    """An archive of one file, plain and as it travels."""

    def __init__(self, directory: Path, contents: bytes) -> None:
        file = directory / "packed"
        file.write_bytes(contents)
        self.plain = b"".join(pack(file))
        file.unlink()
        hasher = NarHasher()
        hasher.feed(self.plain)
        self.hash = hasher.hash
        self.travelled = b"".join(compress([self.plain]))

    def store(self, store: LocalNarStore, request: str = "r") -> StoredObject:
        writer = store.open_writer(request)
        writer.append(0, self.travelled)
        return writer.finish(self.hash, len(self.plain), len(self.travelled), Compression.ZSTD)


@pytest.fixture
def nar(tmp_path: Path) -> Nar:
    return Nar(tmp_path, os.urandom(200_000) + bytes(100_000))


@pytest.fixture
def store(tmp_path: Path) -> LocalNarStore:
    return LocalNarStore(tmp_path)


def files(store_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(store_dir)) for path in store_dir.rglob("*") if path.is_file())


def test_an_upload_in_pieces_is_read_back_from_any_offset(
    store: LocalNarStore, nar: Nar, tmp_path: Path
) -> None:
    writer = store.open_writer("r")
    for offset in range(0, len(nar.travelled), 50_000):
        assert writer.append(offset, nar.travelled[offset : offset + 50_000]) == writer.offset
    stored = writer.finish(nar.hash, len(nar.plain), len(nar.travelled), Compression.ZSTD)
    digits = nar.hash.removeprefix("sha256:")
    assert stored == StoredObject(
        f"{digits}.nar.zst", nar.hash, len(nar.plain), len(nar.travelled), Compression.ZSTD
    )
    assert files(tmp_path) == [f"nar/objects/{digits[:2]}/{digits}.nar.zst"]
    for offset in (0, 77, len(nar.travelled)):
        with store.open_reader(stored.object, offset) as file:
            assert file.read() == nar.travelled[offset:]


def test_a_plain_archive_is_stored_too(store: LocalNarStore, nar: Nar) -> None:
    writer = store.open_writer("r")
    writer.append(0, nar.plain)
    stored = writer.finish(nar.hash, len(nar.plain), len(nar.plain), Compression.NONE)
    with store.open_reader(stored.object) as file:
        assert file.read() == nar.plain


def test_a_later_session_goes_on_where_the_earlier_one_stopped(
    store: LocalNarStore, nar: Nar, tmp_path: Path
) -> None:
    with store.open_writer("r") as writer:
        writer.append(0, nar.travelled[:60_000])
    again = LocalNarStore(tmp_path).open_writer("r")
    assert again.offset == 60_000
    assert again.append(50_000, nar.travelled[50_000:]) == len(nar.travelled)
    again.finish(nar.hash, len(nar.plain), len(nar.travelled), Compression.ZSTD)


def test_what_is_stored_already_is_passed_over_and_a_gap_refused(store: LocalNarStore, nar: Nar) -> None:
    writer = store.open_writer("r")
    writer.append(0, nar.travelled[:1000])
    assert writer.append(0, nar.travelled[:1000]) == 1000
    with pytest.raises(UploadGapError) as raised:
        writer.append(1001, b"x")
    assert raised.value.expected == 1000


def test_a_second_writer_of_one_request_ends_the_first(store: LocalNarStore, nar: Nar) -> None:
    first = store.open_writer("r")
    first.append(0, nar.travelled[:1000])
    second = store.open_writer("r")
    with pytest.raises(WriterClosedError):
        first.append(1000, b"x")
    first.discard()
    assert second.append(1000, nar.travelled[1000:]) == len(nar.travelled)
    second.finish(nar.hash, len(nar.plain), len(nar.travelled), Compression.ZSTD)


def test_a_new_upload_has_no_file_before_its_first_byte(
    store: LocalNarStore, nar: Nar, tmp_path: Path
) -> None:
    writer = store.open_writer("r", is_new=True)
    assert (writer.offset, files(tmp_path)) == (0, [])
    writer.close()
    with pytest.raises(WriterClosedError):
        writer.append(0, nar.travelled)
    assert files(tmp_path) == []


def test_what_a_new_upload_finds_in_its_place_is_not_its_own(store: LocalNarStore, nar: Nar) -> None:
    with store.open_writer("r") as left:
        left.append(0, nar.travelled + b"of an upload that no row names")
    writer = store.open_writer("r", is_new=True)
    writer.append(0, nar.travelled)
    writer.finish(nar.hash, len(nar.plain), len(nar.travelled), Compression.ZSTD)
    assert store.has(f"{nar.hash.removeprefix('sha256:')}.nar.zst")


@pytest.mark.parametrize(
    "damage", ["flipped", "truncated", "longer", "size", "hash", "no hash", "file size", "no archive"]
)
def test_what_is_not_the_declared_archive_leaves_nothing(
    store: LocalNarStore, nar: Nar, tmp_path: Path, damage: str
) -> None:
    travelled, plain_size, nar_hash = bytearray(nar.travelled), len(nar.plain), nar.hash
    if damage == "flipped":
        travelled[len(travelled) // 2] ^= 1
    elif damage == "truncated":
        del travelled[-10:]
    elif damage == "longer":
        travelled += b"x"
    elif damage == "size":
        plain_size += 8
    elif damage == "hash":
        nar_hash = "sha256:" + "0" * 64
    elif damage == "no hash":
        nar_hash = "../../etc/passwd"
    elif damage == "no archive":
        hasher = NarHasher()
        hasher.feed(b"no archive at all")
        travelled = bytearray(zstandard.compress(b"no archive at all"))
        plain_size, nar_hash = hasher.size, hasher.hash
    writer = store.open_writer("r")
    writer.append(0, travelled)
    file_size = len(travelled) + (1 if damage == "file size" else 0)
    with pytest.raises(NarError) as raised:
        writer.finish(nar_hash, plain_size, file_size, Compression.ZSTD)
    assert "\n" not in str(raised.value)
    assert files(tmp_path) == []
    assert store.open_writer("r").offset == 0


def test_equal_contents_share_one_object_and_keep_its_size(
    store: LocalNarStore, nar: Nar, tmp_path: Path
) -> None:
    first = nar.store(store, "one")
    other = zstandard.compress(nar.plain, 9)
    writer = store.open_writer("two")
    writer.append(0, other)
    second = writer.finish(nar.hash, len(nar.plain), len(other), Compression.ZSTD)
    assert second == first
    assert len(files(tmp_path)) == 1


def test_a_damaged_object_is_replaced_by_the_next_upload(
    store: LocalNarStore, nar: Nar, tmp_path: Path
) -> None:
    stored = nar.store(store, "one")
    [path] = tmp_path.rglob("*.nar.zst")
    path.write_bytes(nar.travelled[:-1] + b"?")
    assert nar.store(store, "two") == stored
    with store.open_reader(stored.object) as file:
        assert file.read() == nar.travelled
    assert len(files(tmp_path)) == 1


def test_an_object_whose_row_is_not_committed_is_not_deleted(store: LocalNarStore, nar: Nar) -> None:
    stored = nar.store(store, "one")
    nar.store(store, "two")
    assert not store.delete(stored.object)
    store.settle(stored.object)
    assert not store.delete(stored.object)
    store.settle(stored.object)
    assert store.has(stored.object)
    assert store.delete(stored.object)
    assert not store.delete(stored.object)
    with pytest.raises(ObjectMissingError):
        store.open_reader(stored.object)


def test_a_doom_is_void_once_the_object_is_stored_again(store: LocalNarStore, nar: Nar) -> None:
    stored = nar.store(store, "one")
    store.settle(stored.object)
    first = store.doom(stored.object)
    assert first is not None
    assert store.doom(stored.object) is None, "somebody is about to delete it"
    nar.store(store, "two")
    store.settle(stored.object)
    second = store.doom(stored.object)
    assert second is not None
    assert not store.delete_doomed(first)
    store.spare(first)
    assert store.has(stored.object)
    assert store.delete_doomed(second)
    assert not store.delete_doomed(second)
    assert not store.has(stored.object)


def test_a_deletion_that_was_cut_leaves_nothing_after_the_next_start(
    store: LocalNarStore, nar: Nar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stored = nar.store(store, "one")
    store.settle(stored.object)

    def die(_path: Path) -> None:
        raise SystemExit

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", die)
        with pytest.raises(SystemExit):
            store.delete(stored.object)
    assert not store.has(stored.object)
    assert store.discard_partials_except([]) == 1
    assert files(tmp_path) == []


def test_the_directory_of_partial_files_is_made_again_when_somebody_has_removed_it(
    store: LocalNarStore, nar: Nar, tmp_path: Path
) -> None:
    [partial] = tmp_path.rglob("partial")
    partial.rmdir()
    assert store.has(nar.store(store, "one").object)


def test_racing_uploads_of_equal_contents_all_succeed(store: LocalNarStore, nar: Nar, tmp_path: Path) -> None:
    stored: list[StoredObject] = []
    barrier = threading.Barrier(4)

    def upload(request: str) -> None:
        barrier.wait(10)
        stored.append(nar.store(store, request))

    threads = [threading.Thread(target=upload, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(stored) == 4
    assert len(set(stored)) == 1
    assert len(files(tmp_path)) == 1


def test_names_from_outside_are_no_paths(store: LocalNarStore, tmp_path: Path) -> None:
    store.open_writer("../../outside").append(0, b"x")
    assert files(tmp_path.parent / tmp_path.name)[0].startswith("nar/partial/")
    for name in ("../secret", "ab", "/etc/passwd", "a" * 64):
        with pytest.raises(ValueError, match="names no object"):
            store.open_reader(name)


def test_partials_nobody_knows_are_removed_at_the_start(store: LocalNarStore, tmp_path: Path) -> None:
    for request in ("known", "lost", "expired"):
        store.open_writer(request).append(0, b"some bytes")
    assert store.discard_partial("expired")
    assert not store.discard_partial("expired")
    later = LocalNarStore(tmp_path)
    assert later.discard_partials_except(["known"]) == 1
    assert later.open_writer("known").offset == 10
    assert later.open_writer("lost").offset == 0


def test_more_than_the_limit_is_refused(store: LocalNarStore) -> None:
    writer = store.open_writer("r", max_bytes=10)
    writer.append(0, b"12345678")
    with pytest.raises(NarError, match="more than 10 bytes"):
        writer.append(8, b"901")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every write stores half of its bytes and then finds no room, as a disk does."""
    real = os.pwrite

    def write_half(fd: int, data: memoryview, offset: int) -> int:
        if len(data) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: len(data) // 2], offset)

    monkeypatch.setattr(durable.os, "pwrite", write_half)
    yield
    monkeypatch.setattr(durable.os, "pwrite", real)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_one_line_and_keeps_what_was_acknowledged(
    store: LocalNarStore, nar: Nar, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.open_writer("r")
    with monkeypatch.context() as roomy:
        roomy.setattr(durable.os, "pwrite", lambda fd, data, _offset: os.write(fd, data))
        writer.append(0, nar.travelled[:1000])
    with pytest.raises(StorageFullError, match="no room left") as raised:
        writer.append(1000, nar.travelled[1000:])
    assert "\n" not in str(raised.value)
    writer.close()
    assert store.open_writer("r").offset == 1000


def test_a_disk_that_fails_to_sync_keeps_the_upload_for_another_try(
    store: LocalNarStore, nar: Nar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = store.open_writer("r")
    writer.append(0, nar.travelled)
    with monkeypatch.context() as broken:
        broken.setattr(nar_store.os, "fsync", refuse)
        with pytest.raises(StorageFullError):
            writer.finish(nar.hash, len(nar.plain), len(nar.travelled), Compression.ZSTD)
    assert [name.split("/")[1] for name in files(tmp_path)] == ["partial"]
    again = store.open_writer("r")
    assert again.offset == len(nar.travelled)
    again.finish(nar.hash, len(nar.plain), len(nar.travelled), Compression.ZSTD)


def test_the_file_is_synced_before_its_name_and_the_name_before_the_answer(
    store: LocalNarStore, nar: Nar, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_sync, real_link = os.fsync, os.link

    def sync(fd: int) -> None:
        done.append("sync " + Path(f"/proc/self/fd/{fd}").readlink().parent.name)
        real_sync(fd)

    def link(source: Path, target: Path) -> None:
        done.append("link")
        real_link(source, target)

    monkeypatch.setattr(nar_store.os, "fsync", sync)
    monkeypatch.setattr(nar_store.os, "link", link)
    nar.store(store)
    assert done[0] == "sync partial"
    assert done[-2:] == ["link", "sync objects"]
