"""The frame inspector shows what was sent, to the last whole frame, and no secret."""

import io
from pathlib import Path

import msgpack
import pytest
from gradient_protocol.codec import encode
from gradient_protocol.envelope import wrap
from gradient_protocol.framing import frame
from gradient_protocol.inspect import describe, main, read_frames
from gradient_protocol.messages import server, worker

LISTED = server.RevokeJob(job_ids=["job-1"])


def lines(stream: bytes) -> list[str]:
    return [describe(found) for found in read_frames(io.BytesIO(stream))]


def test_frames_are_shown_with_their_place() -> None:
    first, second = frame(encode(LISTED)), frame(wrap(encode(LISTED)))
    shown = lines(first + second)
    assert shown[0].split() == ["0", str(len(first) - 4), "RevokeJob", '{"job_ids":', '["job-1"]}']
    assert shown[1].split()[:4] == [str(len(first)), str(len(second) - 4), "RevokeJob", "(Zstd)"]


@pytest.mark.parametrize(
    ("tail", "problem"),
    [
        (b"\0\0", "after 2 bytes of a length"),
        (frame(encode(LISTED))[:-3], "of its bytes"),
        (b"\xff\0\0\0rest", "over the limit"),
    ],
)
def test_a_stream_may_end_in_the_middle(tail: bytes, problem: str) -> None:
    shown = lines(frame(encode(LISTED)) + tail)
    assert len(shown) == 2
    assert "RevokeJob" in shown[0]
    assert problem in shown[1]


@pytest.mark.parametrize(
    "payload",
    [b"\xc1", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", msgpack.packb([1]), encode(LISTED) + b"\xc0"],
)
def test_what_cannot_be_read_is_named_and_the_rest_shown(payload: bytes) -> None:
    shown = lines(frame(payload) + frame(encode(LISTED)))
    assert "!!" in shown[0]
    assert "RevokeJob" in shown[1]


def test_no_secret_is_shown() -> None:
    stream = frame(encode(worker.AuthResponse(tokens={"peer-1": "geheim"})))
    stream += frame(msgpack.packb({"type": "AuthResponse", "tokens": "geheim"}))
    target = server.Put(
        url="https://u:geheim@s3.example/b/k?X-Signature=geheim", headers={"Auth": "geheim"}, expires_secs=5.0
    )
    stream += frame(encode(server.UploadGrant(request_id="r", target=target)))
    parts = server.Multipart(urls=["https://s3.example/b/k?sig=geheim"], part_size=5, expires_secs=5.0)
    stream += frame(encode(server.UploadGrant(request_id="r", target=parts)))
    status = {"p": server.PathStatus(held=True, url="https://s3.example/b/k?sig=geheim")}
    stream += frame(encode(server.CacheStatus(query_id="q", paths=status)))
    shown = "\n".join(lines(stream))
    assert "geheim" not in shown
    assert "peer-1" in shown
    assert "https://s3.example/b/k?(hidden)" in shown


def test_long_values_are_shortened() -> None:
    chunk = worker.LogChunk(assignment_id="a" * 5000, offset=0, data=bytes(100_000))
    assert len(lines(frame(encode(chunk)))[0]) < 500
    many = server.RevokeJob(job_ids=["j"] * 1000)
    assert "... 980 more" in lines(frame(encode(many)))[0]


def test_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "stream"
    path.write_bytes(frame(encode(LISTED)))
    assert main([str(path), "--sizes"]) == 0
    assert capsys.readouterr().out.split() == ["0", str(len(encode(LISTED))), "RevokeJob"]
    path.write_bytes(frame(encode(LISTED))[:-1])
    assert main([str(path)]) == 1
    assert main([str(tmp_path / "absent")]) == 2
    assert "No such file" in capsys.readouterr().err
