"""What is refused, with which code, and what lives on."""

import resource
from typing import Any

import msgpack
import msgspec
import pytest
from gradient_protocol import limits
from gradient_protocol.codec import Decoder, Side, encode
from gradient_protocol.errors import JobContentError, ProtocolError, ReportContentError
from gradient_protocol.framing import FrameReader, frame
from gradient_protocol.messages import common, server, shapes, worker

from tests.unit.protocol.samples import ASSIGN_JOB, CANDIDATE

FROM_WORKER = Decoder(Side.WORKER)
FROM_SERVER = Decoder(Side.SERVER)
HEARTBEAT_ACK = {"type": "HeartbeatAck", "n": 1, "server_time": 2.0}
NESTED_BOMB = b"\x82\xa4type\xa9RevokeJob\xa7job_ids" + b"\x91" * 5000


def pack(value: object) -> bytes:
    return msgpack.packb(value)


def code_of(decoder: Decoder, payload: bytes) -> int:
    with pytest.raises(ProtocolError) as caught:
        decoder.decode(payload)
    assert type(caught.value) is ProtocolError
    assert "\n" not in caught.value.reason
    return caught.value.code


def nested(depth: int) -> object:
    value: object = None
    for _ in range(depth):
        value = [value]
    return value


def test_a_message_of_another_implementation_is_read() -> None:
    """Other key order, an integer for a float, a nil, an unknown field."""
    payload = pack({"server_time": 3, "n": 7, "later": {"a": [1, 2]}, "type": "HeartbeatAck"})
    assert FROM_SERVER.decode(payload) == server.HeartbeatAck(n=7, server_time=3.0)
    payload = pack({"type": "Draining", "reason": None})
    assert FROM_SERVER.decode(payload) == common.Draining()


def test_one_name_is_two_messages_by_direction() -> None:
    report = worker.ClusterSignalReport(assignment_id="a", seq=1, attempt="t", topic="x", payload=b"p")
    assert FROM_WORKER.decode(encode(report)) == report
    signal = server.ClusterSignal(
        attempt="t", n=1, sender=shapes.MemberAddress(role="r", index=0), topic="x", payload=b"p"
    )
    assert pack(msgspec.msgpack.decode(encode(signal)))
    assert msgspec.msgpack.decode(encode(signal))["from"] == {"role": "r", "index": 0}
    assert FROM_SERVER.decode(encode(signal)) == signal
    assert code_of(FROM_WORKER, encode(signal)) == 400


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x80",
        pack([]),
        pack("HeartbeatAck"),
        pack({"n": 1, "server_time": 2.0}),
        pack({"type": 5}),
        pack({"type": "Unheard"}),
        pack({"type": "JobCompleted"}),  # the worker's to send
        pack(HEARTBEAT_ACK)[:-1],
        pack(HEARTBEAT_ACK) + b"\xc0",
        pack(HEARTBEAT_ACK) * 2,
        pack({**HEARTBEAT_ACK, "n": 1.0}),
        pack({**HEARTBEAT_ACK, "n": True}),
        pack({**HEARTBEAT_ACK, "n": "1"}),
        pack({**HEARTBEAT_ACK, "n": -1}),
        pack({**HEARTBEAT_ACK, "n": 2**63}),
        pack({**HEARTBEAT_ACK, "n": None}),
        pack({**HEARTBEAT_ACK, "server_time": msgpack.Timestamp(1)}),
        pack({**HEARTBEAT_ACK, "x": msgpack.ExtType(1, b"x")}),
        pack({**HEARTBEAT_ACK, "x": [[msgpack.ExtType(1, b"x")]]}),
        pack({"type": "AbortJob", "assignment_id": "a"}),
        pack({"type": "AbortJob", "assignment_id": b"a", "reason": ""}),
        b"\x83\xa4type\xa8AbortJob\xadassignment_id\xa1\xff\xa6reason\xa0",  # not UTF-8
        pack({"type": "AssignJob", "job_id": "j", "assignment_id": "a"}),
    ],
)
def test_malformed_is_400(payload: bytes) -> None:
    assert code_of(FROM_SERVER, payload) == 400


@pytest.mark.parametrize(
    "payload",
    [
        pack({**HEARTBEAT_ACK, "x": nested(16)}),  # 17 with the message itself
        pack({"x": nested(16), **HEARTBEAT_ACK}),
        pack({**HEARTBEAT_ACK, "x": [0] * 100_001}),
        pack({**HEARTBEAT_ACK, "x": {str(n): 0 for n in range(100_001)}}),
        pack({"type": "RevokeJob", "job_ids": ["x"] * 100_001}),
        pack({"type": "Unheard", "x": nested(16)}),
        pack({"x": nested(16)}),
        NESTED_BOMB,
        b"\x82\xa4type\xa9RevokeJob\xa7job_ids\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa9RevokeJob\xa1x" + b"\xdd\x00\x01\xff\xff" * 1000,
        b"\x91" * limits.MAX_MESSAGE,
        pack(
            {"type": "NarPush", "transfer_id": "t", "offset": 0, "data": bytes(255 * 1024 + 1), "last": True}
        ),
        encode(server.JobOffer(candidates=[CANDIDATE] * 1001, is_final=True)),
        encode(server.JobListChunk(candidates=[CANDIDATE] * 1001, is_final=True)),
        encode(
            server.JobOffer(
                candidates=[msgspec.structs.replace(CANDIDATE, job_id="j" * 1024 * 1024)], is_final=True
            )
        ),
        encode(msgspec.structs.replace(ASSIGN_JOB, job=ASSIGN_JOB.job))
        .replace(b"\xa3job", b"\xa1x" + b"\x91" * 16 + b"\xc0\xa3job", 1)
        .replace(b"\x84", b"\x85", 1),
    ],
)
def test_a_breach_of_a_limit_is_413(payload: bytes) -> None:
    assert code_of(FROM_SERVER, payload) == 413


@pytest.mark.parametrize(
    "payload",
    [
        pack({**HEARTBEAT_ACK, "x": nested(15)}),
        pack({"type": "RevokeJob", "job_ids": ["x"] * 100_000}),
        pack({"type": "NarPush", "transfer_id": "t", "offset": 0, "data": bytes(255 * 1024), "last": True}),
        encode(server.JobOffer(candidates=[CANDIDATE] * 1000, is_final=True)),
        pack(
            {
                "type": "NarPush",
                "transfer_id": "t",
                "offset": 0,
                "data": b"\xdd\xff\xff\xff\xff",
                "last": True,
            }
        ),
        pack(
            {"type": "AbortJob", "assignment_id": "a", "reason": "\u07ff\u0745"}
        ),  # bytes like array headers
    ],
)
def test_what_just_keeps_the_limits_is_taken(payload: bytes) -> None:
    FROM_SERVER.decode(payload)


def test_a_chunk_may_hide_nothing_beside_its_data() -> None:
    chunk = {"type": "LogChunk", "assignment_id": "a", "offset": 1}
    for size in (0, 1, 255, 256, 65_535, 65_536):
        data = b"\x91" * size
        assert FROM_WORKER.decode(pack({**chunk, "data": data})) == worker.LogChunk(
            assignment_id="a", offset=1, data=data
        )
        assert code_of(FROM_WORKER, pack({**chunk, "data": data, "x": nested(16)})) == 413
        assert code_of(FROM_WORKER, pack({**chunk, "data": data, "x": msgpack.ExtType(1, b"")})) == 400


def test_bombs_are_refused_without_growth() -> None:
    bombs = [NESTED_BOMB, b"\x91" * 1_000_000]
    bombs += [
        b"\x82\xa4type\xa9RevokeJob\xa7job_ids" + header * 1000
        for header in (b"\xdd\x00\x01\x86\xa0", b"\xdc\xff\xff")
    ]
    bombs += [
        b"\x82\xa4type\xa8LogChunk\xa4data" + header
        for header in (b"\xc6\x7f\xff\xff\xff", b"\xdb\x7f\xff\xff\xff")
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bomb in bombs:
        for decoder in (FROM_SERVER, FROM_WORKER):
            with pytest.raises(ProtocolError):
                decoder.decode(bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB


FETCHED = {"type": "FetchResult", "path": "p", "nar_hash": "h", "nar_size": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "JobUpdate", "update": {**FETCHED, "nar_size": "big"}},
        {"type": "JobUpdate", "update": {"type": "Unheard"}},
        {"type": "JobUpdate", "update": {**FETCHED, "x": msgpack.ExtType(1, b"x")}},
        {"type": "JobUpdate"},
        {"type": "JobCompleted", "spans": [{"kind": "Nap", "start": 0.0, "end": 1.0}], "spans_dropped": 0},
        {
            "type": "JobFailed",
            "kind": "Permanent",
            "missing_paths": [],
            "spans": [],
            "spans_dropped": 0,
            "error": "x" * 65_537,
        },
        {
            "type": "JobFailed",
            "kind": "Permanent",
            "missing_paths": [],
            "spans": [],
            "spans_dropped": 0,
            "error": "\u20ac" * 30_000,
        },
        {"type": "ClusterSignal", "attempt": "t", "topic": "x", "payload": "text"},
    ],
)
def test_a_reports_bad_content_names_it(fields: dict[str, Any]) -> None:
    with pytest.raises(ReportContentError) as caught:
        FROM_WORKER.decode(pack({**fields, "assignment_id": "a-1", "seq": 3}))
    assert (caught.value.assignment_id, caught.value.seq, caught.value.code) == ("a-1", 3, 400)


@pytest.mark.parametrize(
    "fields",
    [
        {"assignment_id": "a", "update": FETCHED},
        {"assignment_id": "a", "seq": 0, "update": FETCHED},
        {"assignment_id": "a", "seq": 1.0, "update": FETCHED},
        {"assignment_id": 5, "seq": 1, "update": FETCHED},
        {"seq": 1, "update": FETCHED},
        {"assignment_id": "a", "seq": 1, "update": {"type": "Started"}},
        {"assignment_id": "a", "update": {"type": "Stage", "stage": "Nap"}},
    ],
)
def test_a_report_whose_ids_cannot_be_read_ends_the_session(fields: dict[str, Any]) -> None:
    assert code_of(FROM_WORKER, pack({"type": "JobUpdate", **fields})) == 400


def test_a_reports_trailing_bytes_or_bombs_end_the_session() -> None:
    report = {"type": "JobUpdate", "assignment_id": "a", "seq": 1, "update": FETCHED}
    assert FROM_WORKER.decode(pack(report))
    assert code_of(FROM_WORKER, pack(report) + b"\xc0") == 400
    assert code_of(FROM_WORKER, pack(report)[:-1]) == 400
    assert code_of(FROM_WORKER, pack({**report, "update": {**FETCHED, "x": nested(16)}})) == 413


def raw_job(**changes: object) -> dict[str, Any]:
    message: dict[str, Any] = msgpack.unpackb(encode(ASSIGN_JOB))
    message["job"].update(changes)
    return message


@pytest.mark.parametrize(
    "changes",
    [{"type": "Dance"}, {"inputs": 5}, {"cores": -1}, {"command": [1]}, {"x": msgpack.ExtType(1, b"")}],
)
def test_an_unreadable_job_names_its_assignment(changes: dict[str, object]) -> None:
    with pytest.raises(JobContentError) as caught:
        FROM_SERVER.decode(pack(raw_job(**changes)))
    assert caught.value.assignment_id == ASSIGN_JOB.assignment_id


def test_what_stands_around_a_job_ends_the_session() -> None:
    assert FROM_SERVER.decode(pack(raw_job())) == ASSIGN_JOB
    assert code_of(FROM_SERVER, pack({**raw_job(), "cluster": {"attempt": 5}})) == 400
    assert code_of(FROM_SERVER, pack({**raw_job(), "x": msgpack.ExtType(1, b"")})) == 400
    assert code_of(FROM_SERVER, pack(raw_job()) + b"\xc0") == 400


def test_no_secret_in_a_repr_or_a_reason() -> None:
    assert "geheim" not in repr(worker.AuthResponse(tokens={"p": "geheim"}))
    with pytest.raises(ProtocolError) as caught:
        FROM_WORKER.decode(pack({"type": "AuthResponse", "tokens": {"p": "geheim", "q": 5}}))
    assert "geheim" not in str(caught.value)


def test_frames_are_cut_wherever_the_bytes_fall() -> None:
    payloads = [bytes([n % 256]) * (n * 7 % 500 + 1) for n in range(60)]
    stream = b"".join(map(frame, payloads))
    for step in (1, 3, 64, len(stream)):
        reader = FrameReader()
        found = []
        for begin in range(0, len(stream), step):
            reader.feed(stream[begin : begin + step])
            while (payload := reader.next_payload()) is not None:
                found.append(payload)
        assert found == payloads
        assert reader.pending_bytes == 0


def test_a_length_over_the_limit_is_refused_before_its_bytes_come() -> None:
    reader = FrameReader(limit=100)
    reader.feed(b"\0\0\0\x65")
    with pytest.raises(ProtocolError) as caught:
        reader.next_payload()
    assert caught.value.code == 413
    reader = FrameReader(limit=100)
    reader.feed(b"\0\0\0\x64" + bytes(10))
    assert reader.next_payload() is None
    assert reader.missing_bytes == 90
    reader = FrameReader()
    reader.feed(b"\0\0\0\0")
    with pytest.raises(ProtocolError, match="empty"):
        reader.next_payload()
