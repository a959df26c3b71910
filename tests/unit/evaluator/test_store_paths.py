"""Paths are those of the specification's worked examples, and nix agrees on the base 32."""

import hashlib
import shutil
import subprocess

import pytest
from gradient_protocol import store_paths
from gradient_worker.evaluator.environment import input_variable, is_reserved, package_name


def hello(**changes: object) -> store_paths.Form:
    fields: dict[str, object] = {
        "name": "hello-1.0",
        "system": "any",
        "features": [],
        "command": ["/bin/sh", "-c", "echo hi > $out"],
        "env": {},
        "outputs": ["out"],
        "inputs": {},
        "sources": [],
        "fixed_output": None,
    }
    return store_paths.recipe_form(**{**fields, **changes})  # type: ignore[arg-type]  # as given above


def test_the_first_worked_example() -> None:
    drv_path = store_paths.derivation_path(hello())
    assert drv_path == "3hgapfbfpym67mny7gaq75qm4x4nw19x-hello-1.0.drv"
    assert (
        store_paths.output_path(drv_path, "hello-1.0", "out") == "i1b887k8663rb1x9s5n9pcyap4l8rvzj-hello-1.0"
    )


def test_the_second_worked_example() -> None:
    twice = hello(
        name="twice-1.0",
        command=["/bin/sh", "-c", "cat $HELLO $HELLO > $out; mkdir $doc"],
        outputs=["out", "doc"],
        inputs={"3hgapfbfpym67mny7gaq75qm4x4nw19x-hello-1.0.drv": ["out"]},
    )
    drv_path = store_paths.derivation_path(twice)
    assert drv_path == "ilsl85bhcn566z1fd66x0940lcc04y0f-twice-1.0.drv"
    paths = [store_paths.output_path(drv_path, "twice-1.0", output) for output in ("out", "doc")]
    assert paths == [
        "nq6xniibqdh5nlfcvpy7265qc3a0gv4w-twice-1.0",
        "m64rwvvzm0d3r20mgbpyn7b5vamp3c49-twice-1.0-doc",
    ]


def test_json_has_sorted_keys_no_spaces_and_only_the_escapes_it_needs() -> None:
    value = {"b": 'ü"\\/\n\x1f\x7f', "a": [1, True, {"é": "", "z": "😀"}]}
    expected = '{"a":[1,true,{"z":"😀","é":""}],"b":"ü\\"\\\\/\\n\\u001f\x7f"}'
    assert store_paths.canonical_json(value) == expected.encode()


@pytest.mark.skipif(shutil.which("nix-hash") is None, reason="nix-hash is not installed")
@pytest.mark.parametrize("text", [b"", b"hello", b"other"])
def test_base_32_is_as_nix_prints_it(text: bytes) -> None:
    start = hashlib.sha256(text).hexdigest()[:40]
    # SHA-1 has as many bytes as H keeps, so nix can be asked to print them.
    command = ["nix-hash", "--type", "sha1", "--to-base32", start]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert store_paths.short_hash(text) == printed


def test_a_members_path_says_what_its_cluster_is() -> None:
    members = [
        store_paths.member_form(role=role, primary=False, pin=pin, recipe=hello(name=f"{role}-1"))
        for role, pin in (("a", None), ("b", "w1"))
    ]
    cluster = store_paths.cluster_form(name="c", same_zone=True, retry_budget=1, members=members)
    assert store_paths.canonical_json(cluster).startswith(b'{"members":[{"primary":false,"recipe":{"command"')
    assert b'"pin":"w1"' in store_paths.canonical_json(cluster)
    assert store_paths.derivation_path(hello(), cluster) != store_paths.derivation_path(hello())


def test_a_download_and_a_source_go_where_their_contents_say() -> None:
    fixed = store_paths.FixedOutput(url="https://a.example/x", sha256="ab" * 32)
    elsewhere = store_paths.FixedOutput(url="https://b.example/x", sha256="ab" * 32)
    first = store_paths.output_path("one.drv", "x-1", "out", fixed)
    assert first == store_paths.output_path("other.drv", "x-1", "out", elsewhere)
    assert first == store_paths.short_hash(f"fixed:{'ab' * 32}:x-1".encode()) + "-x-1"
    assert (
        store_paths.source_path("sha256:00") == store_paths.short_hash(b"source:sha256:00:source") + "-source"
    )


@pytest.mark.parametrize(
    ("name", "output", "variable"),
    [
        ("lib-a-1.0", "out", "LIB_A"),
        ("lib-a-1.0", "dev", "LIB_A_DEV"),
        ("source", None, "SOURCE"),
        ("gtk+3-3.24", "out", "GTK_3"),
        ("plain", "out", "PLAIN"),
        ("a-b-c", "x-y", "A_B_C_X_Y"),
        ("ends-", "out", "ENDS"),
    ],
)
def test_variables_of_inputs(name: str, output: str | None, variable: str) -> None:
    assert input_variable(name, output) == variable


def test_the_version_starts_at_the_first_dash_that_no_letter_follows() -> None:
    assert [package_name(name) for name in ("a-1", "lib-a-1.0-rc", "a-b", "a-.b", "a--b")] == [
        "a",
        "lib-a",
        "a-b",
        "a",
        "a",
    ]
    assert [is_reserved(name) for name in ("HOME", "GRADIENT_X", "HOMES")] == [True, True, False]
