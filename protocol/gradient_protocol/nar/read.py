"""Reading an archive as it arrives, and refusing whatever is not exactly one.

Bytes in, events out, no input or output. The reader buffers at most one name, target or run of
fixed words (a few KiB); contents of files pass through as slices of what was fed.

States and what each waits for:

| State     | Waits for                                    | Then                          |
|-----------|----------------------------------------------|-------------------------------|
| MAGIC     | the magic string and the root's opening      | KIND                          |
| KIND      | regular, executable, symlink or directory    | SIZE, TARGET or ENTRY         |
| SIZE      | the length of the contents                   | CONTENTS                      |
| CONTENTS  | that many bytes                              | FILE_END                      |
| FILE_END  | padding and the node's end                   | NODE_END                      |
| TARGET    | a symlink's target and the node's end        | NODE_END                      |
| ENTRY     | an entry's opening, or the directory's end   | NAME, or NODE_END             |
| NAME      | a name and the opening of its node           | KIND                          |
| NODE_END  | the entry's end (none at the root)           | ENTRY, or DONE                |
| DONE      | nothing                                      | any further byte is an error  |
"""

import enum

import msgspec

from gradient_protocol.nar.layout import (
    MAX_DEPTH,
    MAX_NAME_BYTES,
    MAX_TARGET_BYTES,
    NarError,
    padding,
    show,
    string,
)

__all__ = [
    "BeginDirectory",
    "BeginFile",
    "EndDirectory",
    "EndFile",
    "FileData",
    "NarEvent",
    "NarReader",
    "Symlink",
]


class BeginDirectory(msgspec.Struct, frozen=True):
    """A directory opens. `name` is empty for the root."""

    name: bytes


class EndDirectory(msgspec.Struct, frozen=True):
    """The innermost open directory is complete."""


class BeginFile(msgspec.Struct, frozen=True):
    """A file of `size` bytes begins; its data follows. `name` is empty for the root."""

    name: bytes
    executable: bool
    size: int


class FileData(msgspec.Struct, frozen=True):
    """A piece of the file that began last, as a view: nothing is copied."""

    data: memoryview


class EndFile(msgspec.Struct, frozen=True):
    """The file that began last is complete."""


class Symlink(msgspec.Struct, frozen=True):
    """A symlink. `name` is empty for the root; `target` is never empty and holds no NUL."""

    name: bytes
    target: bytes


NarEvent = BeginDirectory | EndDirectory | BeginFile | FileData | EndFile | Symlink

_END_DIRECTORY = EndDirectory()
_END_FILE = EndFile()

_OPEN_NODE = string(b"(") + string(b"type")
_MAGIC = string(b"nix-archive-1") + _OPEN_NODE
_CLOSE = string(b")")
_ENTRY = string(b"entry") + string(b"(") + string(b"name")
_NODE = string(b"node") + _OPEN_NODE
_REGULAR = string(b"regular") + string(b"contents")
_EXECUTABLE = string(b"regular") + string(b"executable") + string(b"") + string(b"contents")
_SYMLINK = string(b"symlink") + string(b"target")
_DIRECTORY = string(b"directory")
_KINDS = (_REGULAR, _EXECUTABLE, _SYMLINK, _DIRECTORY)


class _State(enum.Enum):
    MAGIC = enum.auto()
    KIND = enum.auto()
    SIZE = enum.auto()
    CONTENTS = enum.auto()
    FILE_END = enum.auto()
    TARGET = enum.auto()
    ENTRY = enum.auto()
    NAME = enum.auto()
    NODE_END = enum.auto()
    DONE = enum.auto()


class NarReader:
    """Feed it an archive in pieces of any size; call `finish` at the end of the input.

    After a NarError the reader is of no further use.
    """

    def __init__(self) -> None:
        self._state = _State.MAGIC
        self._data = b""
        self._at = 0
        self._events: list[NarEvent] = []
        self._name = b""
        self._executable = False
        self._size = 0
        self._left = 0
        # The name last seen in each open directory, outermost first.
        self._last_names: list[bytes] = []
        self._steps = {
            _State.MAGIC: self._magic,
            _State.KIND: self._kind,
            _State.SIZE: self._file_size,
            _State.CONTENTS: self._contents,
            _State.FILE_END: self._file_end,
            _State.TARGET: self._target,
            _State.ENTRY: self._entry,
            _State.NAME: self._entry_name,
            _State.NODE_END: self._node_end,
            _State.DONE: self._done,
        }

    def feed(self, data: bytes | memoryview) -> list[NarEvent]:
        """The events that `data` completes. Raises NarError at the first byte that cannot be right."""
        self._data = self._data + data if self._data else bytes(data)
        self._at = 0
        self._events = []
        steps = self._steps
        while steps[self._state]():
            pass
        self._data = self._data[self._at :]
        return self._events

    def finish(self) -> None:
        """Raises NarError unless exactly one whole archive was fed."""
        if self._state is not _State.DONE:
            raise NarError("the archive ends in the middle")

    def _expect(self, words: bytes) -> bool:
        """Whether `words` are there. Says no at the first byte that differs, not only at the last."""
        if self._data.startswith(words, self._at):
            self._at += len(words)
            return True
        if words.startswith(self._data[self._at : self._at + len(words)]):
            return False
        raise NarError("not an archive: an unexpected word or padding")

    def _bounded(self, limit: int, what: str) -> bytes | None:
        """A string of 1 to `limit` bytes without NUL, or None until it is there, left unconsumed."""
        if len(self._data) - self._at < 8:
            return None
        start = self._at + 8
        length = int.from_bytes(self._data[self._at : start], "little")
        if not 0 < length <= limit:
            raise NarError(f"a {what} of {length} bytes (1 to {limit} are allowed)")
        end = start + length
        pad = padding(length)
        if len(self._data) < end + len(pad):
            return None
        if self._data[end : end + len(pad)] != pad:
            raise NarError(f"the padding of a {what} is not zero")
        value = self._data[start:end]
        if b"\0" in value:
            raise NarError(f"a {what} with a NUL byte: {show(value)}")
        self._at = end + len(pad)
        return value

    def _magic(self) -> bool:
        if not self._expect(_MAGIC):
            return False
        self._state = _State.KIND
        return True

    def _kind(self) -> bool:
        data, at = self._data, self._at
        for kind in _KINDS:
            if data.startswith(kind, at):
                self._at += len(kind)
                self._begin(kind)
                return True
        present = data[at : at + len(_EXECUTABLE)]
        if any(kind.startswith(present) for kind in _KINDS):
            return False
        raise NarError("neither a file, a directory nor a symlink, or an unexpected word in it")

    def _begin(self, kind: bytes) -> None:
        if kind is _DIRECTORY:
            if len(self._last_names) >= MAX_DEPTH:
                raise NarError(f"more than {MAX_DEPTH} directories deep")
            self._last_names.append(b"")
            self._events.append(BeginDirectory(self._name))
            self._state = _State.ENTRY
        elif kind is _SYMLINK:
            self._state = _State.TARGET
        else:
            self._executable = kind is _EXECUTABLE
            self._state = _State.SIZE

    def _file_size(self) -> bool:
        if len(self._data) - self._at < 8:
            return False
        self._size = self._left = int.from_bytes(self._data[self._at : self._at + 8], "little")
        if self._size >= 1 << 63:
            raise NarError(f"a file of {self._size} bytes")
        self._at += 8
        self._events.append(BeginFile(self._name, self._executable, self._size))
        self._state = _State.CONTENTS
        return True

    def _contents(self) -> bool:
        piece = memoryview(self._data)[self._at : self._at + self._left]
        if len(piece):
            self._events.append(FileData(piece))
            self._at += len(piece)
            self._left -= len(piece)
        if self._left:
            return False
        self._state = _State.FILE_END
        return True

    def _file_end(self) -> bool:
        if not self._expect(padding(self._size) + _CLOSE):
            return False
        self._events.append(_END_FILE)
        self._state = _State.NODE_END
        return True

    def _target(self) -> bool:
        before = self._at
        target = self._bounded(MAX_TARGET_BYTES, "symlink target")
        if target is None:
            return False
        if not self._expect(_CLOSE):
            self._at = before
            return False
        self._events.append(Symlink(self._name, target))
        self._state = _State.NODE_END
        return True

    def _entry(self) -> bool:
        if self._data.startswith(_CLOSE, self._at):
            self._at += len(_CLOSE)
            self._last_names.pop()
            self._events.append(_END_DIRECTORY)
            self._state = _State.NODE_END
            return True
        if _CLOSE.startswith(self._data[self._at : self._at + len(_CLOSE)]) or not self._expect(_ENTRY):
            return False
        self._state = _State.NAME
        return True

    def _entry_name(self) -> bool:
        before = self._at
        name = self._bounded(MAX_NAME_BYTES, "name")
        if name is None:
            return False
        if name in {b".", b".."} or b"/" in name:
            raise NarError(f"a name that leads elsewhere: {show(name)}")
        last = self._last_names[-1]
        if name <= last:
            fault = "twice" if name == last else "out of order"
            raise NarError(f"the name {show(name)} {fault} in a directory")
        if not self._expect(_NODE):
            self._at = before
            return False
        self._last_names[-1] = name
        self._name = name
        self._state = _State.KIND
        return True

    def _node_end(self) -> bool:
        if not self._last_names:
            self._state = _State.DONE
            return True
        if not self._expect(_CLOSE):
            return False
        self._state = _State.ENTRY
        return True

    def _done(self) -> bool:
        if self._at < len(self._data):
            raise NarError("data after the archive's end")
        return False
