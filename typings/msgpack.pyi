"""The part of msgpack 1.x that is used here."""

from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

class ExtType(NamedTuple):
    code: int
    data: bytes

class Timestamp:
    seconds: int
    nanoseconds: int
    def __init__(self, seconds: int, nanoseconds: int = 0) -> None: ...
    def to_unix(self) -> float: ...

class UnpackException(Exception): ...
class BufferFull(UnpackException): ...
class OutOfData(UnpackException): ...
class FormatError(ValueError, UnpackException): ...
class StackError(ValueError, UnpackException): ...

UnpackValueError = ValueError

class ExtraData(ValueError):
    unpacked: Any
    extra: bytes

PackException = Exception
PackValueError = ValueError
PackOverflowError = OverflowError

class Packer:
    def __init__(
        self,
        *,
        default: Callable[[Any], Any] | None = None,
        use_single_float: bool = False,
        autoreset: bool = True,
        use_bin_type: bool = True,
        strict_types: bool = False,
        datetime: bool = False,
        unicode_errors: str | None = None,
        buf_size: int = ...,
    ) -> None: ...
    def pack(self, obj: object) -> bytes: ...
    def pack_array_header(self, size: int) -> bytes: ...
    def pack_map_header(self, size: int) -> bytes: ...
    def pack_ext_type(self, typecode: int, data: bytes) -> bytes: ...
    def bytes(self) -> bytes: ...
    def reset(self) -> None: ...

class Unpacker(Iterator[Any]):
    def __init__(
        self,
        file_like: IO[bytes] | None = None,
        *,
        read_size: int = 0,
        use_list: bool = True,
        raw: bool = False,
        timestamp: int = 0,
        strict_map_key: bool = True,
        object_hook: Callable[[dict[Any, Any]], Any] | None = None,
        object_pairs_hook: Callable[[list[tuple[Any, Any]]], Any] | None = None,
        list_hook: Callable[[list[Any]], Any] | None = None,
        unicode_errors: str | None = None,
        max_buffer_size: int = ...,
        ext_hook: Callable[[int, bytes], Any] = ...,
        max_str_len: int = -1,
        max_bin_len: int = -1,
        max_array_len: int = -1,
        max_map_len: int = -1,
        max_ext_len: int = -1,
    ) -> None: ...
    def feed(self, next_bytes: bytes | bytearray | memoryview) -> None: ...
    def __iter__(self) -> Unpacker: ...
    def __next__(self) -> Any: ...
    def unpack(self) -> Any: ...
    def skip(self) -> None: ...
    def read_bytes(self, nbytes: int) -> bytes: ...
    def read_array_header(self) -> int: ...
    def read_map_header(self) -> int: ...
    def tell(self) -> int: ...

def packb(
    o: object,
    *,
    default: Callable[[Any], Any] | None = None,
    use_single_float: bool = False,
    use_bin_type: bool = True,
    strict_types: bool = False,
    datetime: bool = False,
    unicode_errors: str | None = None,
) -> bytes: ...
def unpackb(
    packed: bytes | bytearray | memoryview,
    *,
    use_list: bool = True,
    raw: bool = False,
    timestamp: int = 0,
    strict_map_key: bool = True,
    object_hook: Callable[[dict[Any, Any]], Any] | None = None,
    object_pairs_hook: Callable[[list[tuple[Any, Any]]], Any] | None = None,
    list_hook: Callable[[list[Any]], Any] | None = None,
    unicode_errors: str | None = None,
    ext_hook: Callable[[int, bytes], Any] = ...,
    max_str_len: int = -1,
    max_bin_len: int = -1,
    max_array_len: int = -1,
    max_map_len: int = -1,
    max_ext_len: int = -1,
) -> Any: ...
def pack(o: object, stream: IO[bytes], **kwargs: Any) -> None: ...
def unpack(stream: IO[bytes], **kwargs: Any) -> Any: ...

dump = pack
dumps = packb
load = unpack
loads = unpackb
