"""What an evaluation's batch must look like before it touches the database. Pure.

A batch that fails here is refused whole (protocol.md, Reports that must not be lost): the reason is
one line for the person who reads the evaluation's failure. What depends on stored rows (an unknown
input, an output that an input does not have) is checked where the rows are read.
"""

import math
import re
from collections.abc import Sequence

from gradient_protocol.messages.shapes import (
    BuildProduct,
    BuiltOutput,
    Cluster,
    Derivation,
    EvalResult,
    FetchResult,
)

from gradient_server.domain.plausible import MAX_BYTES, plausible

__all__ = [
    "NAR_HASH",
    "STORE_PATH",
    "check_batch",
    "check_built_output",
    "check_fetch_result",
    "check_members",
    "check_product",
    "find_cycle",
    "is_stored_integer",
    "is_stored_time",
]

STORE_PATH = re.compile(r"[0-9abcdfghijklmnpqrsvwxyz]{32}-[0-9A-Za-z+\-._?=]{1,211}")
NAR_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_ROLE = re.compile(r"[0-9A-Za-z._\-]{1,64}")
_OUTPUT_NAME = re.compile(r"[0-9A-Za-z_.+\-]{1,64}")
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")
_MAX_NAME = 211
_MAX_TEXT = 4_096
_MAX_CLUSTER_MEMBERS = 1_000
# Seconds; a century, so that a figure that is a mistake is told from one that is generous.
_MAX_TIMEOUT_SECS = 100 * 366 * 86_400.0


def check_batch(batch: EvalResult) -> str | None:
    """Why the batch is refused, None if it is well formed."""
    seen: set[str] = set()
    for derivation in batch.derivations:
        if derivation.drv_path in seen:
            return f"{derivation.drv_path} is named twice in one batch"
        seen.add(derivation.drv_path)
        reason = _check_derivation(derivation)
        if reason is not None:
            return f"{derivation.name[:_MAX_NAME]!r}: {reason}"
    cycle = find_cycle(batch.derivations)
    if cycle is not None:
        return "the builds need each other in a circle: " + " -> ".join(cycle)
    taken: set[str] = set()
    for cluster in batch.clusters:
        reason = _check_cluster(cluster, seen, taken)
        if reason is not None:
            return f"cluster {cluster.name[:_MAX_NAME]!r}: {reason}"
    return None


def check_fetch_result(result: FetchResult) -> str | None:
    """Why a fetched source is refused, None if it is well formed."""
    if STORE_PATH.fullmatch(result.path) is None:
        return f"{result.path[:_MAX_NAME]!r} is not a store path"
    return _check_nar(result.nar_hash, result.nar_size)


def check_built_output(output: BuiltOutput) -> str | None:
    """Why an output as it was built is refused, None if it is well formed."""
    for reference in output.references:
        if STORE_PATH.fullmatch(reference) is None:
            return f"the reference {reference[:_MAX_NAME]!r} is not a store path"
    return _check_nar(output.nar_hash, output.nar_size)


def check_product(product: BuildProduct, outputs: set[str]) -> str | None:
    """Why a product is refused, None if it is well formed."""
    if product.output not in outputs:
        return f"a product names the output {product.output[:_MAX_NAME]!r}, which the build does not have"
    if max(len(product.path), len(product.type), len(product.name)) > _MAX_TEXT:
        return f"a product's path, type or name is longer than {_MAX_TEXT} characters"
    if product.size is not None and not is_stored_integer(product.size):
        return "a product's size is no size"
    return None


def _check_nar(nar_hash: str, nar_size: int) -> str | None:
    if NAR_HASH.fullmatch(nar_hash) is None:
        return "nar_hash must be sha256: and 64 hexadecimal digits"
    return "nar_size is no size" if plausible(nar_size, MAX_BYTES) is None else None


def find_cycle(derivations: Sequence[Derivation]) -> list[str] | None:
    """The names along a circle of inputs within `derivations`, None if there is none."""
    by_path = {derivation.drv_path: derivation for derivation in derivations}
    waits = dict.fromkeys(by_path, 0)
    needed_by: dict[str, list[str]] = {path: [] for path in by_path}
    for derivation in derivations:
        for wanted in derivation.inputs:
            if wanted.drv_path in by_path:
                waits[derivation.drv_path] += 1
                needed_by[wanted.drv_path].append(derivation.drv_path)
    ready = [path for path, count in waits.items() if count == 0]
    while ready:
        for dependent in needed_by[ready.pop()]:
            waits[dependent] -= 1
            if waits[dependent] == 0:
                ready.append(dependent)
    stuck = next((path for path, count in waits.items() if count > 0), None)
    return None if stuck is None else _walk_cycle(by_path, waits, stuck)


def _walk_cycle(by_path: dict[str, Derivation], waits: dict[str, int], start: str) -> list[str]:
    # Whatever is stuck has an input that is stuck, so following them must come back to itself.
    order: dict[str, int] = {}
    walk: list[str] = []
    path = start
    while path not in order:
        order[path] = len(walk)
        walk.append(path)
        path = next(wanted.drv_path for wanted in by_path[path].inputs if waits.get(wanted.drv_path, 0) > 0)
    return [by_path[step].name for step in [*walk[order[path] :], path]]


def _check_derivation(derivation: Derivation) -> str | None:
    if STORE_PATH.fullmatch(derivation.drv_path) is None or not derivation.drv_path.endswith(".drv"):
        return f"{derivation.drv_path[:_MAX_NAME]!r} is not the path of a derivation"
    if not 0 < len(derivation.name) <= _MAX_NAME:
        return f"the name must have 1 to {_MAX_NAME} characters"
    if not 0 < len(derivation.system) <= _MAX_NAME or len(derivation.pname or "") > _MAX_NAME:
        return f"system and pname must have 1 to {_MAX_NAME} characters"
    if derivation.fixed_output is not None:
        if derivation.command:
            return "a download (fixed_output) has no command"
        if _SHA256_HEX.fullmatch(derivation.fixed_output.sha256) is None:
            return "fixed_output.sha256 must be 64 hexadecimal digits"
    for label, value in (("timeout", derivation.timeout_secs), ("max_silent", derivation.max_silent_secs)):
        if value is not None and not (math.isfinite(value) and 0 < value <= _MAX_TIMEOUT_SECS):
            return f"{label} must be a positive number of seconds"
    if derivation.attr is not None and len(derivation.attr) > _MAX_TEXT:
        return f"attr is longer than {_MAX_TEXT} characters"
    return _check_outputs(derivation) or _check_inputs(derivation)


def _check_outputs(derivation: Derivation) -> str | None:
    if not derivation.outputs:
        return "it has no outputs"
    names = [output.name for output in derivation.outputs]
    paths = [output.path for output in derivation.outputs]
    if len(set(names)) < len(names) or len(set(paths)) < len(paths):
        return "two outputs have one name or one path"
    for output in derivation.outputs:
        if _OUTPUT_NAME.fullmatch(output.name) is None:
            return f"{output.name[:_MAX_NAME]!r} is not the name of an output"
        if STORE_PATH.fullmatch(output.path) is None:
            return f"{output.path[:_MAX_NAME]!r} is not a store path"
    return None


def _check_inputs(derivation: Derivation) -> str | None:
    inputs = [wanted.drv_path for wanted in derivation.inputs]
    if len(set(inputs)) < len(inputs):
        return "one input is named twice"
    if len(set(derivation.sources)) < len(derivation.sources):
        return "one source is named twice"
    for wanted in derivation.inputs:
        if len(set(wanted.outputs)) < len(wanted.outputs):
            return f"an output of the input {wanted.drv_path[:_MAX_NAME]!r} is named twice"
    for source in derivation.sources:
        if STORE_PATH.fullmatch(source) is None:
            return f"the source {source[:_MAX_NAME]!r} is not a store path"
    return None


def check_members(members: Sequence[tuple[str, bool, str | None]]) -> str | None:
    """Why members, as (role, primary, pin), cannot be those of one cluster."""
    if sum(primary for _, primary, _ in members) > 1:
        return "it has more than one primary"
    pins: set[str] = set()
    for role, _, pin in members:
        if _ROLE.fullmatch(role) is None:
            return f"{role[:_MAX_NAME]!r} is no role: 1 to 64 letters, digits, '.', '_' or '-'"
        if pin is None:
            continue
        if not 0 < len(pin) <= _MAX_NAME:
            return "a pin is the id or the name of a worker"
        if pin in pins:
            return f"two members are pinned to the worker {pin!r}"
        pins.add(pin)
    return None


def _check_cluster(cluster: Cluster, batch: set[str], taken: set[str]) -> str | None:
    if not cluster.name or len(cluster.name) > _MAX_NAME:
        return f"the name must have 1 to {_MAX_NAME} characters"
    if not 0 < len(cluster.members) <= _MAX_CLUSTER_MEMBERS:
        return f"it must have 1 to {_MAX_CLUSTER_MEMBERS} members"
    if cluster.retry_budget < 0:
        return "retry_budget is negative"
    reason = check_members([(member.role, member.primary, member.pin) for member in cluster.members])
    if reason is not None:
        return reason
    for member in cluster.members:
        if member.drv_path not in batch:
            return f"its member {member.drv_path[:_MAX_NAME]!r} is not in the batch that names it"
        if member.drv_path in taken:
            return f"its member {member.drv_path} is in a cluster already"
        taken.add(member.drv_path)
    return None


def is_stored_integer(value: int) -> bool:
    """Whether a count or size from the wire fits a column: not negative, at most 63 bits."""
    return 0 <= value < 1 << 63


def is_stored_time(value: float) -> bool:
    """Whether a time or another figure from the wire is a number at all."""
    return math.isfinite(value)
