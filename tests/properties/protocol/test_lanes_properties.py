"""Lanes never reorder, never starve control and keep their quantum; windows never exceed."""

import pytest
from gradient_protocol.errors import ProtocolError
from gradient_protocol.lanes import Lanes, Window
from gradient_protocol.limits import BULK_QUANTUM, BULK_WINDOW, MAX_CHUNK_DATA
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

STREAMS = st.integers(1, 5)


class LanesMachine(RuleBasedStateMachine):
    """Frames are named by their order, so that the other end can tell."""

    @initialize()
    def start(self) -> None:
        self.lanes = Lanes()
        self.next_control = 0
        self.next_bulk = dict.fromkeys(range(1, 6), 0)
        self.seen_control = 0
        self.seen_bulk = dict.fromkeys(range(1, 6), 0)
        self.waiting: list[int] = []  # streams with a frame, in the order of their turns

    @rule(size=st.integers(4, 400_000))
    def put_control(self, size: int) -> None:
        frame = b"C" + self.next_control.to_bytes(3, "big")
        self.lanes.put_control(frame + bytes(size - 4))
        self.next_control += 1

    @rule(stream=STREAMS, size=st.integers(5, MAX_CHUNK_DATA))
    def put_bulk(self, stream: int, size: int) -> None:
        frame = b"B" + bytes([stream]) + self.next_bulk[stream].to_bytes(3, "big") + bytes(size - 5)
        if self.lanes.holds(stream):
            with pytest.raises(ValueError, match="holds a frame"):
                self.lanes.put_bulk(stream, frame)
            return
        self.lanes.put_bulk(stream, frame)
        self.waiting.append(stream)
        self.next_bulk[stream] += 1

    @rule()
    def take(self) -> None:
        batch = self.lanes.take()
        pending = self.next_control - self.seen_control
        if batch is None:
            assert not pending
            assert not self.waiting
            return
        if batch.control_bytes:
            assert not batch.streams
            assert batch.data[:1] == b"C"
            self.seen_control += self.count_control(batch.data)
        else:
            assert not pending, "bulk was taken while control waited"
            assert len(batch.data) <= BULK_QUANTUM
            assert list(batch.streams) == self.waiting[: len(batch.streams)], "out of turn"
            del self.waiting[: len(batch.streams)]
            for stream in batch.streams:
                marker = b"B" + bytes([stream]) + self.seen_bulk[stream].to_bytes(3, "big")
                assert marker in batch.data
                self.seen_bulk[stream] += 1
        self.lanes.written(batch)

    def count_control(self, data: bytes) -> int:
        count = 0
        position = 0
        while position < len(data):
            marker = b"C" + (self.seen_control + count).to_bytes(3, "big")
            assert data[position : position + 4] == marker, "control was reordered"
            count += 1
            following = data.find(b"C" + (self.seen_control + count).to_bytes(3, "big"), position + 4)
            position = following if following >= 0 else len(data)
        return count

    @invariant()
    def bytes_are_accounted(self) -> None:
        assert (self.lanes.control_bytes == 0) == (self.next_control == self.seen_control)


class WindowMachine(RuleBasedStateMachine):
    """What is unacknowledged never exceeds the window, whatever is acknowledged when."""

    @initialize(offset=st.integers(0, 10**12))
    def start(self, offset: int) -> None:
        self.window = Window(offset)

    @rule(size=st.integers(0, MAX_CHUNK_DATA))
    def send(self, size: int) -> None:
        end = self.window.sent + size
        if self.window.allows(end):
            self.window.send(end)

    @rule(part=st.floats(0, 1))
    @precondition(lambda self: self.window.sent > self.window.acknowledged)
    def acknowledge(self, part: float) -> None:
        before = self.window.acknowledged
        offset = before + int(part * (self.window.sent - before))
        assert self.window.acknowledge(offset) == (offset > before)
        assert self.window.acknowledged == max(before, offset)

    @rule(beyond=st.integers(1, 1000))
    def acknowledge_too_much(self, beyond: int) -> None:
        before = self.window.acknowledged
        with pytest.raises(ProtocolError):
            self.window.acknowledge(self.window.sent + beyond)
        assert self.window.acknowledged == before

    @invariant()
    def never_exceeds(self) -> None:
        if hasattr(self, "window"):
            assert 0 <= self.window.sent - self.window.acknowledged <= BULK_WINDOW


TestLanes = LanesMachine.TestCase
TestLanes.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
