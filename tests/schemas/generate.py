"""The wire schema and one recorded frame of every message, as files that change only on purpose.

`python -m tests.schemas.generate` writes them anew; the test in `tests/unit/protocol` compares.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
from gradient_protocol.codec import encode
from gradient_protocol.framing import frame
from gradient_protocol.limits import MAX_INT
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.server import SERVER_MESSAGES
from gradient_protocol.messages.worker import WORKER_MESSAGES

from tests.unit.protocol.samples import sample_messages

__all__ = ["DIRECTORY", "frames", "schema"]

DIRECTORY = Path(__file__).parent
_inspect = msgspec.inspect


def schema() -> dict[str, Any]:
    """Messages by sender and shapes by class: fields with their types; a `?` marks an optional one.

    A `count` is an integer from 0 to 2^63 - 1.
    """
    shapes: dict[str, Any] = {}
    document: dict[str, Any] = {
        "worker": {_tag(cls): _fields(cls, shapes) for cls in WORKER_MESSAGES},
        "server": {_tag(cls): _fields(cls, shapes) for cls in SERVER_MESSAGES},
    }
    document["shapes"] = dict(sorted(shapes.items()))
    return document


def frames() -> dict[str, list[dict[str, str]]]:
    """By sender: each message without and with its optional fields, as a frame in hex."""
    recorded: dict[str, list[dict[str, str]]] = {}
    for full in (False, True):
        for sender, messages in sample_messages(full=full).items():
            recorded.setdefault(sender, []).extend(map(_record, messages))
    return recorded


def _record(message: Message) -> dict[str, str]:
    return {"type": _tag(type(message)), "frame": frame(encode(message)).hex()}


def _tag(cls: type[msgspec.Struct]) -> str:
    return str(cls.__struct_config__.tag)


def _fields(cls: type[msgspec.Struct], shapes: dict[str, Any]) -> dict[str, str]:
    info = _inspect.type_info(cls)
    assert isinstance(info, _inspect.StructType)
    return {
        field.encode_name + ("" if field.required else "?"): _name(field.type, shapes)
        for field in info.fields
    }


def _name(kind: _inspect.Type, shapes: dict[str, Any]) -> str:
    match kind:
        case _inspect.UnionType():
            return " | ".join(_name(member, shapes) for member in kind.types)
        case _inspect.StructType():
            return _shape(kind, shapes)
        case _inspect.ListType():
            return f"[{_name(kind.item_type, shapes)}]"
        case _inspect.DictType():
            return f"{{{_name(kind.key_type, shapes)}: {_name(kind.value_type, shapes)}}}"
        case _inspect.EnumType():
            return "/".join(str(member.value) for member in kind.cls)
        case _inspect.IntType():
            assert (kind.ge, kind.le) == (0, MAX_INT)
            return "count"
        case _:
            return type(kind).__name__.removesuffix("Type").lower()


def _shape(kind: _inspect.StructType, shapes: dict[str, Any]) -> str:
    name = kind.cls.__name__
    if name not in shapes:
        shapes[name] = {}
        tag = {"type": f"= {_tag(kind.cls)}"} if kind.cls.__struct_config__.tag else {}
        shapes[name] = {**tag, **_fields(kind.cls, shapes)}
    return name


def main() -> None:
    """Writes both files."""
    for name, document in (("wire", schema()), ("frames", frames())):
        (DIRECTORY / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
