"""The order in which paths may be removed."""

from gradient_worker.stores.base import PathInfo
from gradient_worker.stores.garbage import choose_victims, closure
from hypothesis import given
from hypothesis import strategies as st


def infos(graph: dict[str, str]) -> dict[str, PathInfo]:
    return {path: PathInfo(path, "sha256:0", 10, tuple(refs)) for path, refs in graph.items()}


def victims(graph: dict[str, str], pinned: str = "", excess_bytes: int = 1000) -> str:
    ages = {path: float(ord(path)) for path in graph}
    return "".join(choose_victims(infos(graph), ages, pinned, excess_bytes))


def test_the_oldest_goes_first_but_after_what_refers_to_it() -> None:
    assert victims({"a": "", "b": "", "c": "a"}) == "bca"


def test_no_more_goes_than_is_needed() -> None:
    assert victims({"a": "", "b": "", "c": ""}, excess_bytes=11) == "ab"
    assert victims({"a": "", "b": ""}, excess_bytes=0) == ""


def test_a_pin_protects_everything_below_it() -> None:
    assert victims({"a": "", "b": "a", "c": "b", "d": "a"}, pinned="b") == "cd"


def test_outputs_that_refer_to_one_another_go_together() -> None:
    assert victims({"a": "ab", "b": "ab", "c": ""}, excess_bytes=15) == "cba"
    # What refers to the ring goes with it, and before it.
    assert victims({"a": "b", "b": "a", "c": "b", "d": "d"}, excess_bytes=25) == "cdba"


graphs = st.dictionaries(st.sampled_from("abcdefgh"), st.text("abcdefgh", max_size=3), max_size=8)


@given(graphs, st.text("abcdefgh", max_size=2), st.integers(-5, 100))
def test_enough_goes_nothing_protected_does_and_no_reference_is_left_hanging(
    graph: dict[str, str], pinned: str, excess_bytes: int
) -> None:
    held = infos(graph)
    chosen = victims(graph, pinned, excess_bytes)
    protected = closure(held, pinned)
    assert len(set(chosen)) == len(chosen)
    assert not protected & set(chosen)
    assert 10 * len(chosen) >= excess_bytes or set(chosen) | protected == set(graph)
    left = set(graph) - set(chosen)
    for path in left:
        assert not set(graph[path]) & set(chosen), "a path that stays refers to one that went"
