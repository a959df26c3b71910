"""Hypothesis strategies for every message, from msgspec's view of the classes."""

from typing import Any, cast

import msgspec
from gradient_protocol.limits import MAX_INT
from gradient_protocol.messages import shapes
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.worker import JobUpdate
from hypothesis import strategies as st

__all__ = ["messages"]

_SMALL = 3  # elements an array or map: every shape is reached, and each example stays cheap
_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_INT = st.integers(0, 300) | st.integers(0, MAX_INT)
_FLOAT = st.floats(allow_nan=False)
_LIVE_UPDATES = (shapes.Started, shapes.Stage, shapes.EvalStageUpdate)


def messages(cls: type[Message]) -> st.SearchStrategy[Message]:
    """Well-formed messages of one class."""
    drawn = cast("st.SearchStrategy[Message]", _strategy(msgspec.inspect.type_info(cls)))
    if cls is JobUpdate:
        return drawn.map(lambda message: _with_seq(cast("JobUpdate", message)))
    return drawn


def _with_seq(update: JobUpdate) -> JobUpdate:
    """A numbered report has a `seq`, any other update has none."""
    numbered = not isinstance(update.update, _LIVE_UPDATES)
    return msgspec.structs.replace(update, seq=max(1, update.seq or 1) if numbered else None)


def _strategy(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    inspect = msgspec.inspect
    match kind:
        case inspect.UnionType():
            return st.one_of([_strategy(member) for member in kind.types])
        case inspect.NoneType():
            return st.none()
        case inspect.StructType():
            return _struct(kind)
        case inspect.ListType():
            return st.lists(_strategy(kind.item_type), max_size=_SMALL)
        case inspect.DictType():
            return st.dictionaries(_strategy(kind.key_type), _strategy(kind.value_type), max_size=_SMALL)
        case inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case inspect.StrType():
            return _TEXT
        case inspect.IntType():
            return _INT
        case inspect.FloatType():
            return _FLOAT
        case inspect.BoolType():
            return st.booleans()
        case inspect.BytesType():
            return st.binary(max_size=40)
        case _:
            raise AssertionError(f"a type that the wire does not have: {kind}")


def _struct(kind: msgspec.inspect.StructType) -> st.SearchStrategy[Any]:
    fields = {field.name: _strategy(field.type) for field in kind.fields}
    if "seq" in fields and issubclass(kind.cls, Message) and kind.cls.__name__ != "JobUpdate":
        fields["seq"] = fields["seq"].map(lambda seq: seq if seq is None else max(1, seq))
    return st.builds(kind.cls, **fields)
