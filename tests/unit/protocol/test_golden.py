"""The wire does not change by accident."""

import json
from typing import Any

import msgpack
from gradient_protocol.codec import Decoder, Side
from gradient_protocol.framing import FrameReader
from gradient_protocol.messages.server import SERVER_MESSAGES
from gradient_protocol.messages.worker import WORKER_MESSAGES

from tests.schemas.generate import DIRECTORY, frames, schema
from tests.unit.protocol.samples import sample_messages

ADVICE = "the wire changed; if that is meant, run python -m tests.schemas.generate and say so in the commit"


def golden(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DIRECTORY / f"{name}.json").read_text())
    return document


def test_the_schema_is_the_golden_one() -> None:
    assert schema() == golden("wire"), ADVICE


def test_the_encoding_is_the_recorded_one() -> None:
    assert frames() == golden("frames"), ADVICE


def test_recorded_frames_are_read_as_they_were_written() -> None:
    recorded = golden("frames")
    for side in Side:
        expected = [m for full in (False, True) for m in sample_messages(full=full)[side.value]]
        decoder = Decoder(side)
        assert len(recorded[side.value]) == len(expected)
        for record, message in zip(recorded[side.value], expected, strict=True):
            reader = FrameReader()
            reader.feed(bytes.fromhex(record["frame"]))
            payload = reader.next_payload()
            assert payload is not None
            assert decoder.decode(payload) == message
            assert msgpack.unpackb(payload)["type"] == record["type"]


def test_every_message_and_variant_is_recorded() -> None:
    recorded = golden("frames")
    for side, classes in ((Side.WORKER, WORKER_MESSAGES), (Side.SERVER, SERVER_MESSAGES)):
        assert {record["type"] for record in recorded[side.value]} == {
            cls.__struct_config__.tag for cls in classes
        }
    variants = {
        msgpack.unpackb(bytes.fromhex(record["frame"])[4:])["update"]["type"]
        for record in recorded["worker"]
        if record["type"] == "JobUpdate"
    }
    updates = {"Started", "Stage", "EvalStage", "FetchResult", "EvalResult", "EvalStats", "BuildOutput"}
    assert variants == updates
