"""Archives made by hand, so that they can be wrong."""


def string(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(-len(text) % 8)


def strings(*texts: bytes) -> bytes:
    return b"".join(map(string, texts))


MAGIC = string(b"nix-archive-1")


def regular(contents: bytes, *, executable: bool = False) -> bytes:
    flag = strings(b"executable", b"") if executable else b""
    return strings(b"(", b"type", b"regular") + flag + strings(b"contents", contents, b")")


def symlink(target: bytes) -> bytes:
    return strings(b"(", b"type", b"symlink", b"target", target, b")")


def directory(*entries: tuple[bytes, bytes]) -> bytes:
    body = b"".join(
        strings(b"entry", b"(", b"name", name, b"node") + node + string(b")") for name, node in entries
    )
    return strings(b"(", b"type", b"directory") + body + string(b")")
