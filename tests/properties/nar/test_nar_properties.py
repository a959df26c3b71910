"""Any tree survives; any bytes are either an archive or a NarError."""

import tempfile
from pathlib import Path

from gradient_protocol.nar import NarError, NarReader, ReferenceScanner, Unpacker, pack
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.nar.archives import MAGIC, directory, regular, symlink

names = st.binary(min_size=1, max_size=12).filter(
    lambda name: not set(name) & {0, 47} and name not in {b".", b".."}
)
leaves = st.one_of(
    st.builds(
        lambda data, executable: regular(data, executable=executable), st.binary(max_size=40), st.booleans()
    ),
    st.binary(min_size=1, max_size=20).filter(lambda target: 0 not in target).map(symlink),
)
nodes = st.recursive(
    leaves,
    lambda below: st.dictionaries(names, below, max_size=4).map(
        lambda entries: directory(*sorted(entries.items()))
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(nodes, st.integers(1, 64))
def test_unpacking_and_packing_again_gives_the_same_bytes(node: bytes, step: int) -> None:
    with tempfile.TemporaryDirectory() as base:
        unpacker = Unpacker(Path(base) / "copy")
        archive = MAGIC + node
        for at in range(0, len(archive), step):
            unpacker.feed(archive[at : at + step])
        unpacker.finish()
        assert b"".join(pack(Path(base) / "copy", chunk_size=step)) == archive
        unpacker.abort()


@settings(max_examples=200, deadline=None)
@given(nodes, st.data())
def test_a_changed_archive_is_refused_or_has_the_same_meaning_for_every_split(
    node: bytes, data: st.DataObject
) -> None:
    archive = bytearray(MAGIC + node)
    for _ in range(data.draw(st.integers(1, 3))):
        archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))

    def verdict(step: int) -> str:
        reader = NarReader()
        try:
            for at in range(0, len(archive), step):
                reader.feed(bytes(archive[at : at + step]))
            reader.finish()
        except NarError:
            return "refused"
        return "read"

    assert verdict(1) == verdict(7) == verdict(len(archive))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text("0123z", min_size=32, max_size=32), max_size=40),
    st.text("0123z -", max_size=400),
    st.integers(1, 99),
)
def test_the_scanner_finds_what_a_plain_search_finds(hashes: list[str], text: str, step: int) -> None:
    text += "".join(hashes[::2])
    scanner = ReferenceScanner(hashes, [b"01", b"zz "])
    for at in range(0, len(text), step):
        scanner.feed(text[at : at + step].encode())
    assert scanner.found == {hash_part for hash_part in hashes if hash_part in text}
    assert scanner.found_markers == {marker for marker in (b"01", b"zz ") if marker.decode() in text}
