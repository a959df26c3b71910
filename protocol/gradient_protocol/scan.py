"""A walk over one MessagePack value that builds nothing.

msgspec's typed decoders refuse by type and skip what they do not know. What they skip has to keep
the limits of protocol.md ("Stream") too, and may hold no ext type; this walk judges that. It costs
about 0.1 us a value, so `codec` calls it only where it has reason to.
"""

from gradient_protocol.errors import BAD_REQUEST, TOO_LARGE, ProtocolError
from gradient_protocol.limits import MAX_ELEMENTS, MAX_NESTING

__all__ = ["check_limits"]

# First byte -> how many bytes of value follow it, for values of fixed size.
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
_FIXED |= {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
# First byte -> width of the length that follows it.
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
# First byte -> (width of the count that follows it, values an element).
_COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def check_limits(payload: bytes) -> None:
    """Raises ProtocolError 413 beyond nesting 16 or 100,000 elements, 400 for what is not one value."""
    end = len(payload)
    position = 0
    left = 1  # values still to come in the innermost container
    outer: list[int] = []  # the same for those around it
    while True:
        while not left:
            if not outer:
                if position != end:
                    raise ProtocolError(BAD_REQUEST, "trailing bytes after the message")
                return
            left = outer.pop()
        left -= 1
        if position >= end:
            raise ProtocolError(BAD_REQUEST, "the message is truncated")
        first = payload[position]
        position += 1
        if first < 0x80 or first >= 0xE0:
            continue
        if 0xA0 <= first < 0xC0:
            position += first - 0xA0
            continue
        elements, inner, position = _open(payload, first, position)
        if elements is None:
            continue
        if elements > MAX_ELEMENTS:
            raise ProtocolError(TOO_LARGE, f"an array or map of more than {MAX_ELEMENTS} elements")
        if inner > end - position:
            raise ProtocolError(BAD_REQUEST, "the message is truncated")
        outer.append(left)
        if len(outer) > MAX_NESTING:
            raise ProtocolError(TOO_LARGE, f"nested deeper than {MAX_NESTING}")
        left = inner


def _open(payload: bytes, first: int, position: int) -> tuple[int | None, int, int]:
    """What the byte before `position` begins: (elements or None, values inside, where to go on)."""
    if first < 0x90:
        return first - 0x80, 2 * (first - 0x80), position
    if first < 0xA0:
        return first - 0x90, first - 0x90, position
    if (width := _FIXED.get(first)) is not None:
        return None, 0, position + width
    if (width := _SIZED.get(first)) is not None:
        size = int.from_bytes(payload[position : position + width], "big")
        return None, 0, position + width + size
    if (counted := _COUNTED.get(first)) is not None:
        width, values = counted
        elements = int.from_bytes(payload[position : position + width], "big")
        return elements, elements * values, position + width
    raise ProtocolError(BAD_REQUEST, f"ext type or unused byte 0x{first:02x}")
