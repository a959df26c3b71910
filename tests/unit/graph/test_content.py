"""Batches and outputs that cannot be, each with a reason a person can act on."""

from typing import Any

import pytest
from gradient_protocol.messages.shapes import (
    BuildProduct,
    BuiltOutput,
    Cluster,
    ClusterMember,
    Derivation,
    DerivationInput,
    DerivationOutput,
    EvalResult,
    FetchResult,
    FixedOutput,
)
from gradient_server.graph.content import (
    check_batch,
    check_built_output,
    check_fetch_result,
    check_product,
    find_cycle,
)

from tests.fixtures.graph import store_path

HASH = "sha256:" + "0" * 64


def needs(*names: str) -> list[DerivationInput]:
    return [
        DerivationInput(drv_path=store_path(f"{name}.drv"), outputs=["out"], runtime_only=False)
        for name in names
    ]


def derivation(named: str, /, *inputs: str, **fields: Any) -> Derivation:  # noqa: ANN401 - many types
    whole: dict[str, Any] = {
        "drv_path": store_path(f"{named}.drv"),
        "name": named,
        "system": "any",
        "features": [],
        "command": ["/bin/true"],
        "env": {},
        "outputs": [DerivationOutput(name="out", path=store_path(named))],
        "inputs": needs(*inputs),
        "sources": [],
        "prefer_local": False,
    }
    return Derivation(**whole | fields)


def cluster(*names: str, primaries: int = 0, name: str = "c", retry_budget: int = 1) -> Cluster:
    members = [
        ClusterMember(drv_path=store_path(f"{each}.drv"), role=each, primary=place < primaries)
        for place, each in enumerate(names)
    ]
    return Cluster(name=name, same_zone=False, retry_budget=retry_budget, members=members)


def out(name: str = "out", path: str | None = None) -> DerivationOutput:
    return DerivationOutput(name=name, path=path or store_path(name))


@pytest.mark.parametrize(
    ("derivations", "clusters", "reason"),
    [
        ([derivation("a", drv_path="/etc/passwd")], [], "not the path of a derivation"),
        ([derivation("a", drv_path=store_path("a"))], [], "not the path of a derivation"),
        ([derivation("a"), derivation("a")], [], "named twice"),
        ([derivation("a", name="")], [], "the name must have"),
        ([derivation("a", system="")], [], "system and pname must have 1 to 211"),
        ([derivation("a", outputs=[])], [], "no outputs"),
        ([derivation("a", outputs=[out("x"), out("x", store_path("y"))])], [], "one name or one path"),
        ([derivation("a", outputs=[out("x"), out("y", store_path("x"))])], [], "one name or one path"),
        ([derivation("a", outputs=[out("a/b", store_path("x"))])], [], "not the name of an output"),
        ([derivation("a", outputs=[out(path="../x")])], [], "not a store path"),
        ([derivation("a", sources=["../x"])], [], "not a store path"),
        ([derivation("a", sources=[store_path("s")] * 2)], [], "one source is named twice"),
        ([derivation("a", inputs=needs("b", "b"))], [], "one input is named twice"),
        ([derivation("a", timeout_secs=float("nan"))], [], "timeout"),
        ([derivation("a", max_silent_secs=-1.0)], [], "max_silent"),
        ([derivation("a", fixed_output=FixedOutput(url="x", sha256="0" * 64))], [], "has no command"),
        ([derivation("a", command=[], fixed_output=FixedOutput(url="x", sha256="0"))], [], "64 hexadecimal"),
        ([derivation("a", attr="x" * 5_000)], [], "attr is longer"),
        ([derivation("a", "a")], [], "a -> a"),
        ([derivation("a", "b"), derivation("b", "c"), derivation("c", "a")], [], "a -> b -> c -> a"),
        ([derivation("a")], [cluster("a", "b")], "not in the batch"),
        ([derivation("a"), derivation("b")], [cluster("a", "b", primaries=2)], "more than one primary"),
        ([derivation("a")], [cluster("a"), cluster("a", name="d")], "in a cluster already"),
        ([derivation("a")], [cluster()], "members"),
        ([derivation("a")], [cluster("a", name="")], "the name must have"),
        ([derivation("a")], [cluster("a", retry_budget=-1)], "retry_budget"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(
    derivations: list[Derivation], clusters: list[Cluster], reason: str
) -> None:
    refusal = check_batch(EvalResult(derivations=derivations, clusters=clusters, warnings=[], errors=[]))
    assert refusal is not None
    assert reason in refusal
    assert "\n" not in refusal


def test_a_batch_may_name_inputs_in_any_order() -> None:
    graph = [derivation("c", "a", "b"), derivation("b", "a"), derivation("a", "elsewhere")]
    batch = EvalResult(derivations=graph, clusters=[cluster("a", "b", primaries=1)], warnings=[], errors=[])
    assert check_batch(batch) is None


def test_a_circle_is_found_behind_a_long_tail() -> None:
    graph = [derivation("n0", "n1")] + [derivation(f"n{i}", f"n{i + 1}") for i in range(1, 5_000)]
    assert find_cycle(graph) is None
    assert find_cycle([*graph, derivation("n5000", "n4998")]) == ["n4998", "n4999", "n5000", "n4998"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"nar_hash": "md5:1"}, "nar_hash"),
        ({"nar_hash": HASH.upper()}, "nar_hash"),
        ({"nar_size": -1}, "nar_size"),
        ({"nar_size": 1 << 63}, "nar_size"),
    ],
)
def test_a_nar_that_cannot_be_is_refused(fields: dict[str, Any], reason: str) -> None:
    nar: dict[str, Any] = {"path": store_path("x"), "nar_hash": HASH, "nar_size": 1} | fields
    output = BuiltOutput(name="out", references=[], contains_store_dir=False, **nar)
    for refusal in (check_built_output(output), check_fetch_result(FetchResult(**nar))):
        assert refusal is not None
        assert reason in refusal


def test_a_product_belongs_to_an_output_and_has_bounds() -> None:
    assert check_product(BuildProduct(output="out", path="a", type="file", name="a", size=1), {"out"}) is None
    for product in (
        BuildProduct(output="doc", path="a", type="file", name="a"),
        BuildProduct(output="out", path="a" * 5_000, type="file", name="a"),
        BuildProduct(output="out", path="a", type="file", name="a", size=-1),
    ):
        assert check_product(product, {"out"}) is not None
