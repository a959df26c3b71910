"""One well-formed message of each class, made from the classes themselves, and a few by hand."""

import enum
from typing import Any

import msgspec
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.server import SERVER_MESSAGES
from gradient_protocol.messages.worker import WORKER_MESSAGES

__all__ = ["ASSIGN_JOB", "CANDIDATE", "sample_messages"]

CANDIDATE = server.Candidate(
    job_id="j",
    kind=JobKind.BUILD,
    required_paths=[server.RequiredPath(path="p", nar_size=5)],
    output_paths=["o"],
)

ASSIGN_JOB = server.AssignJob(
    job_id="01890000-0000-7000-8000-000000000001",
    assignment_id="01890000-0000-7000-8000-000000000002",
    job=shapes.BuildJob(
        project="p",
        drv_path="3hgapfbfpym67mny7gaq75qm4x4nw19x-hello-1.0.drv",
        name="hello-1.0",
        system="any",
        features=["kvm"],
        command=["/bin/sh", "-c", "echo hi > $out"],
        env={"A": "b"},
        inputs=[shapes.BuildInput(path="i", nar_hash="sha256:0", nar_size=7, references=["r"], name="lib-1")],
        outputs=[shapes.DerivationOutput(name="out", path="i1b887k8663rb1x9s5n9pcyap4l8rvzj-hello-1.0")],
        timeout_secs=14400.0,
        max_silent_secs=3600.0,
    ),
)


def sample_messages(*, full: bool) -> dict[str, list[Message]]:
    """Every message by sender: with all optional fields set (`full`) or none, a variant each."""
    return {
        "worker": [message for cls in WORKER_MESSAGES for message in _samples(cls, full=full)],
        "server": [message for cls in SERVER_MESSAGES for message in _samples(cls, full=full)],
    }


def _samples(cls: type[Message], *, full: bool) -> list[Message]:
    """One message, or one for each variant of its union."""
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    values: list[dict[str, Any]] = [{}]
    for number, field in enumerate(info.fields):
        if not field.required and not full:
            continue
        choices = _values(field.type, field.encode_name, number, full=full)
        values = [{**so_far, field.name: choice} for so_far in values for choice in choices]
    return [cls(**_numbered(cls, value)) for value in values]


def _numbered(cls: type[Message], fields: dict[str, Any]) -> dict[str, Any]:
    """`seq` of an update where, and only where, the update is a numbered report."""
    if cls.__name__ != "JobUpdate":
        return fields
    is_live = isinstance(fields["update"], shapes.Started | shapes.Stage | shapes.EvalStageUpdate)
    return {**fields, "seq": None if is_live else 1}


def _values(kind: msgspec.inspect.Type, name: str, number: int, *, full: bool) -> list[Any]:
    inspect = msgspec.inspect
    match kind:
        case inspect.UnionType():
            members = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
            return [value for member in members for value in _values(member, name, number, full=full)]
        case inspect.StructType():
            return [_shape(kind, full=full)]
        case inspect.ListType():
            return [_values(kind.item_type, name, number, full=full)]
        case inspect.DictType():
            return [{f"{name}-key": _values(kind.value_type, name, number, full=full)[0]}]
        case inspect.EnumType():
            members = list(kind.cls)
            assert issubclass(kind.cls, enum.Enum)
            return [members[-1]]
        case inspect.StrType():
            return [f"{name}-{number}"]
        case inspect.IntType():
            return [number + 1]
        case inspect.FloatType():
            return [number + 0.5]
        case inspect.BoolType():
            return [True]
        case inspect.BytesType():
            return [name.encode()]
        case _:
            raise AssertionError(f"a type that the wire does not have: {kind}")


def _shape(kind: msgspec.inspect.StructType, *, full: bool) -> object:
    return kind.cls(
        **{
            field.name: _values(field.type, field.encode_name, number, full=full)[0]
            for number, field in enumerate(kind.fields)
            if field.required or full
        }
    )
