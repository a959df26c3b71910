"""Text on the wire holds no NUL, whoever wrote it, and what cannot be written in UTF-8 is made legible."""

import msgspec
import pytest
from gradient_protocol.codec import Decoder, Side, encode
from gradient_protocol.errors import JobContentError, ProtocolError, ReportContentError
from gradient_protocol.kinds import FailureKind, NoteLevel
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.shapes import BuildJob, BuildOutput, BuildProduct, EvalResult, Note
from gradient_protocol.messages.worker import EvalMessage, ImportRequest, JobFailed, JobUpdate, UploadRequest
from gradient_protocol.text import holds_nul, legible, made_legible

from tests.unit.protocol.samples import ASSIGN_JOB


def eval_message(text: str, assignment_id: str = "a") -> EvalMessage:
    return EvalMessage(assignment_id=assignment_id, level=NoteLevel.ERROR, source=None, message=text)


def failed(error: str) -> JobFailed:
    return JobFailed(
        assignment_id="a",
        seq=1,
        kind=FailureKind.PERMANENT,
        error=error,
        missing_paths=[],
        spans=[],
        spans_dropped=0,
    )


def refusal(message: Message, sender: Side = Side.WORKER) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        Decoder(sender).decode(encode(message))
    assert caught.value.code == 400
    return caught.value


def test_nul_ends_a_session_or_the_report_or_the_job_that_holds_it() -> None:
    for message in (eval_message("a\0b"), eval_message("", assignment_id="\0")):
        assert refusal(message).reason == "EvalMessage: text holds a NUL character"
    assert isinstance(refusal(failed("\0")), ReportContentError)
    note = EvalResult(derivations=[], clusters=[], warnings=[Note(message="x", source="\0")], errors=[])
    error = refusal(JobUpdate(assignment_id="a", seq=2, update=note))
    assert isinstance(error, ReportContentError)
    assert (error.assignment_id, error.seq) == ("a", 2)


def test_nul_in_a_job_is_the_job_s_fault() -> None:
    assert isinstance(ASSIGN_JOB.job, BuildJob)
    job = msgspec.structs.replace(ASSIGN_JOB.job, env={"A\0": "b"})
    error = refusal(msgspec.structs.replace(ASSIGN_JOB, job=job), Side.SERVER)
    assert isinstance(error, JobContentError)
    assert error.assignment_id == ASSIGN_JOB.assignment_id


@pytest.mark.parametrize("text", ["", r"\u0000", "\\\\u0000", "ä€\U0001f600", "a\nb\x01\x7f"])
def test_everything_else_is_text(text: str) -> None:
    for message in (eval_message(text), failed(text)):
        assert not holds_nul(message)
        assert made_legible(message) is message
        assert Decoder(Side.WORKER).decode(encode(message)) == message


def test_zero_bytes_of_numbers_are_not_text() -> None:
    message = JobUpdate(
        assignment_id="a",
        seq=256,
        update=BuildOutput(
            outputs=[],
            products=[BuildProduct(output="out", path="p", type="t", name="n", size=1 << 24)],
            substituted=False,
        ),
    )
    assert b"\0" in encode(message)
    assert Decoder(Side.WORKER).decode(encode(message)) == message


def test_text_from_elsewhere_is_made_legible() -> None:
    name = b"caf\xe9\0".decode(errors="surrogateescape")
    assert legible(name) == r"caf\udce9\0"
    made = made_legible(failed(name))
    assert made.error == r"caf\udce9\0"
    assert Decoder(Side.WORKER).decode(encode(made)) == made
    # What nobody made legible must not end a session either, or nobody would hear of it.
    assert Decoder(Side.WORKER).decode(encode(eval_message("caf\udce9"))) == eval_message(r"caf\udce9")


def test_ids_that_are_stored_are_short() -> None:
    for message in (
        UploadRequest(request_id="x" * 129, assignment_id="a", path="p", size_estimate=1),
        ImportRequest(query_id="x" * 129, assignment_id="a", paths=[]),
    ):
        assert "an id of more than 128 characters" in refusal(message).reason
