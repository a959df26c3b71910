"""Every message survives the way there and back; nothing that arrives does harm."""

import tracemalloc
from typing import Any

import msgpack
import pytest
from gradient_protocol.codec import Decoder, Side, encode
from gradient_protocol.errors import ProtocolError
from gradient_protocol.limits import MAX_NESTING
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.server import SERVER_MESSAGES
from gradient_protocol.messages.worker import WORKER_MESSAGES
from gradient_protocol.scan import check_limits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties.protocol.strategies import messages

BY_SENDER = {Side.WORKER: WORKER_MESSAGES, Side.SERVER: SERVER_MESSAGES}
CASES = [(side, cls) for side, classes in BY_SENDER.items() for cls in classes]
DECODERS = {side: Decoder(side) for side in Side}
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ANY_MESSAGE = st.sampled_from(CASES).flatmap(lambda case: st.tuples(st.just(case[0]), messages(case[1])))


@pytest.mark.parametrize(
    ("side", "cls"), CASES, ids=lambda value: getattr(value, "__name__", value.__class__.__name__)
)
@QUICK
@given(data=st.data())
def test_round_trip_and_two_implementations_agree(
    side: Side, cls: type[Message], data: st.DataObject
) -> None:
    message = data.draw(messages(cls))
    payload = encode(message)
    assert DECODERS[side].decode(payload) == message
    generic = msgpack.unpackb(payload, strict_map_key=True)
    assert generic["type"] == cls.__struct_config__.tag
    backwards = dict(reversed(generic.items()))
    assert DECODERS[side].decode(msgpack.packb({**backwards, "unknown to us": [1]})) == message


@settings(max_examples=300, deadline=None)
@given(payload=st.binary(max_size=200))
def test_random_bytes_are_refused_in_order(payload: bytes) -> None:
    for decoder in DECODERS.values():
        with pytest.raises(ProtocolError):
            decoder.decode(payload)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=ANY_MESSAGE,
    edits=st.lists(st.tuples(st.integers(0), st.integers(0, 255), st.integers(0, 2)), max_size=4),
)
def test_mutated_messages_raise_nothing_else(
    drawn: tuple[Side, Message], edits: list[tuple[int, int, int]]
) -> None:
    side, message = drawn
    payload = bytearray(encode(message))
    for where, byte, what in edits:
        at = where % (len(payload) + 1)
        if what == 0:
            payload[at : at + 1] = bytes([byte])
        elif what == 1:
            payload[at:at] = bytes([byte])
        else:
            del payload[at : at + 1]
    codes: set[int] = set()
    tracemalloc.start()
    try:
        DECODERS[side].decode(bytes(payload))
    except ProtocolError as error:
        codes.add(error.code)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert codes <= {400, 413}
    assert peak < 100_000 + 60 * len(payload)


def depth_of(value: Any) -> int:  # noqa: ANN401 - anything that MessagePack can say
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 0


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40)
LEAVES |= st.binary(max_size=300)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=30,
)


@settings(max_examples=200, deadline=None)
@given(value=VALUES, wrapped=st.integers(0, 20))
def test_the_scan_agrees_with_another_reader(value: object, wrapped: int) -> None:
    for _ in range(wrapped):
        value = [value]
    payload = msgpack.packb(value)
    if depth_of(value) > MAX_NESTING:
        with pytest.raises(ProtocolError) as caught:
            check_limits(payload)
        assert caught.value.code == 413
        return
    check_limits(payload)
    for broken in (payload[:-1], payload + b"\xc0"):
        with pytest.raises(ProtocolError) as caught:
            check_limits(broken)
        assert caught.value.code == 400
