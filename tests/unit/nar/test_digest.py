"""Scanning for references."""

import pytest
from gradient_protocol.nar import ReferenceScanner

A = "3hgapfbfpym67mny7gaq75qm4x4nw19x"
B = "i1b887k8663rb1x9s5n9pcyap4l8rvzj"
C = "nq6xniibqdh5nlfcvpy7265qc3a0gv4w"


@pytest.mark.parametrize("step", [1, 5, 31, 32, 33, 64, 1000])
def test_hashes_are_found_across_every_border(step: int) -> None:
    data = (
        b"\0" * 40
        + A.encode()
        + b"-x"
        + b"z" * 50
        + B.encode()
        + b"z"
        + C[:-1].encode()
        + b"!"
        + b"/srv/w1/store"
    )
    scanner = ReferenceScanner([A, B, C], [b"/srv/w1/", b"/srv/w2/"])
    for at in range(0, len(data), step):
        scanner.feed(data[at : at + step])
    assert scanner.found == {A, B}
    assert scanner.found_markers == {b"/srv/w1/"}


def test_a_hash_in_a_run_longer_than_it_is_worth_to_look_at_piece_by_piece() -> None:
    scanner = ReferenceScanner([A, B])
    scanner.feed(b"a" * 10_000 + B.encode() + b"a" * 10_000)
    assert scanner.found == {B}


def test_something_that_is_no_hash_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="32 characters"):
        ReferenceScanner(["short"])
