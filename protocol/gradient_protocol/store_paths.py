"""Store paths of a graph without Nix (messages.md, "Paths of the directory store"; pure).

Every implementation must come to the same bytes, so this is that page as code and nothing more.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gradient_protocol.messages.shapes import FixedOutput

__all__ = [
    "canonical_json",
    "cluster_form",
    "derivation_path",
    "member_form",
    "output_path",
    "recipe_form",
    "short_hash",
    "source_path",
]

_LETTERS = "0123456789abcdfghijklmnpqrsvwxyz"
_PAIRS = [high + low for high in _LETTERS for low in _LETTERS]
_HASH_BYTES = 20

# The output whose path has no suffix.
OUT = "out"

Form = dict[str, Any]


def canonical_json(value: object) -> bytes:
    """J: sorted keys, no spaces, no escapes but the required ones, in UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def short_hash(text: bytes) -> str:
    """H: the first 20 bytes of SHA-256 as Nix prints them in base 32, 32 letters."""
    # Nix reads the bytes as one little-endian number and prints its digits from the highest; here two at
    # a time, for an evaluation of thousands of builds spends much of its time here.
    number = int.from_bytes(hashlib.sha256(text).digest()[:_HASH_BYTES], "little")
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(_HASH_BYTES * 8 - 10, -1, -10)])


def recipe_form(
    *,
    name: str,
    system: str,
    features: Sequence[str],
    command: Sequence[str],
    env: Mapping[str, str],
    outputs: Sequence[str],
    inputs: Mapping[str, Sequence[str]],
    sources: Sequence[str],
    fixed_output: FixedOutput | None,
) -> Form:
    """What decides a derivation. `inputs` maps each input's drv path to the outputs taken from it."""
    form: Form = {
        "name": name,
        "system": system,
        "features": list(features),
        "command": list(command),
        "env": dict(env),
        "outputs": [{"name": output} for output in outputs],
        "inputs": {drv_path: list(taken) for drv_path, taken in inputs.items()},
        "sources": list(sources),
    }
    if fixed_output is not None:
        form["fixed_output"] = {"url": fixed_output.url, "sha256": fixed_output.sha256}
    return form


def member_form(*, role: str, primary: bool, pin: str | None, recipe: Form) -> Form:
    """A member as it enters the paths of all members of its cluster; `recipe` is without a cluster."""
    form: Form = {"role": role, "primary": primary, "recipe": recipe}
    if pin is not None:
        form["pin"] = pin
    return form


def cluster_form(*, name: str, same_zone: bool, retry_budget: int, members: Sequence[Form]) -> Form:
    """What a member's derivation says of its cluster, members in their order."""
    return {"name": name, "same_zone": same_zone, "retry_budget": retry_budget, "members": list(members)}


def derivation_path(recipe: Form, cluster: Form | None = None) -> str:
    """The drv path of a recipe's form, of a member with its cluster's."""
    form = recipe if cluster is None else {**recipe, "cluster": cluster}
    return f"{short_hash(canonical_json(form))}-{recipe['name']}.drv"


def output_path(drv_path: str, name: str, output: str, fixed_output: FixedOutput | None = None) -> str:
    """Where one output of a derivation goes; a download's depends on its contents alone."""
    if fixed_output is not None:
        return f"{short_hash(f'fixed:{fixed_output.sha256}:{name}'.encode())}-{name}"
    suffix = "" if output == OUT else f"-{output}"
    return f"{short_hash(f'{drv_path}!{output}'.encode())}-{name}{suffix}"


def source_path(nar_hash: str) -> str:
    """Where a source tree goes, whether it was uploaded or cloned."""
    return f"{short_hash(f'source:{nar_hash}:source'.encode())}-source"
