"""What text on the wire must not hold: NUL, which neither a command, a file name nor PostgreSQL takes.

MessagePack can carry it, so whoever reads a message refuses it, and whoever writes one that holds text
from elsewhere (an error, a file's name) makes it legible first.
"""

from typing import Any, TypeVar

import msgspec

from gradient_protocol.messages.common import Message

__all__ = ["holds_nul", "legible", "made_legible"]

M = TypeVar("M", bound=Message)

_encode_json = msgspec.json.Encoder().encode
# How JSON writes NUL; but also, behind another backslash, how it writes these six characters.
_NUL_IN_JSON = rb"\u0000"


def legible(text: str) -> str:
    r"""The same text with NUL as `\0`, and halves of surrogate pairs (bytes of a file's name) as `\udcxx`."""
    return text.encode(errors="backslashreplace").decode().replace("\0", r"\0")


def holds_nul(message: Message) -> bool:
    """Whether any text within holds NUL. Data (bytes) may. About 1 us for a small message."""
    return _NUL_IN_JSON in _encode_json(message) and _any_nul(msgspec.to_builtins(message))


def made_legible(message: M) -> M:
    """The message itself, or a copy with every text made `legible`."""
    try:
        if not holds_nul(message):
            return message
    except UnicodeEncodeError:
        pass
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    return msgspec.convert(_made_legible(plain), type(message))


def _any_nul(value: Any) -> bool:  # noqa: ANN401 - whatever a message is made of
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_any_nul(key) or _any_nul(each) for key, each in value.items())
    return isinstance(value, list | tuple) and any(_any_nul(each) for each in value)


def _made_legible(value: Any) -> Any:  # noqa: ANN401 - as above
    if isinstance(value, str):
        return legible(value)
    if isinstance(value, dict):
        return {_made_legible(key): _made_legible(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_made_legible(each) for each in value]
    return value
