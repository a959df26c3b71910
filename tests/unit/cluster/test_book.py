"""The book: who has arrived, who can start, and since when a cluster ages."""

from dataclasses import replace

import pytest
from gradient_server.cluster.book import ClusterBook
from gradient_server.cluster.instructions import Ending
from gradient_server.domain.status import ClusterStatus

from tests.fakes.cluster import cluster_info
from tests.fakes.scheduler import build


def arrive(book: ClusterBook, now: float, *numbers: int, due_at: float = 0.0) -> None:
    for number in numbers:
        book.arrive(build(f"c-{number}", cluster="c"), now, due_at)


def test_members_that_come_before_their_cluster_is_known_are_kept() -> None:
    book = ClusterBook()
    arrive(book, 1.0, 0, 1)
    assert "build:c-0" in book
    assert book.unknown() == ["c"]
    book.learn(cluster_info("c"), 2.0)
    assert [entry.info.id for entry in book.waiting(2.0)] == ["c"]
    assert book.unknown() == []


def test_a_backoff_of_one_member_holds_all() -> None:
    book = ClusterBook()
    book.learn(cluster_info("c"), 0.0)
    arrive(book, 1.0, 0)
    arrive(book, 1.0, 1, due_at=30.0)
    assert book.waiting(29.0) == []
    assert book.next_startable(1.0) == 30.0
    assert book.waiting(30.0)


def test_aging_runs_from_the_last_arrival_and_only_a_start_or_a_leaving_member_restarts_it() -> None:
    book = ClusterBook()
    book.learn(cluster_info("c"), 0.0)
    arrive(book, 1.0, 0)
    arrive(book, 5.0, 1)
    entry = book.clusters["c"]
    assert entry.ready_since == 5.0
    arrive(book, 6.0, 1)  # told again
    assert entry.ready_since == 5.0
    book.take("c", "t", 7.0)
    arrive(book, 8.0, 0, 1)
    book.give_back("c", Ending.PREPARE_FAILED, "no", 9.0)
    assert entry.ready_since == 5.0
    assert entry.startable_at == 39.0
    book.leave("build:c-0")
    arrive(book, 40.0, 0)
    assert entry.ready_since == 40.0
    book.take("c", "t", 41.0)
    book.started("c")
    arrive(book, 50.0, 0, 1)
    book.give_back("c", Ending.RETRY, "", 60.0)
    assert entry.ready_since == 50.0


def test_a_cluster_that_cannot_start_is_not_taken() -> None:
    book = ClusterBook()
    book.learn(cluster_info("c"), 0.0)
    arrive(book, 1.0, 0)
    with pytest.raises(ValueError, match="cannot start"):
        book.take("c", "t", 1.0)


def test_the_end_of_a_cluster_forgets_its_members() -> None:
    book = ClusterBook()
    book.learn(cluster_info("c"), 0.0)
    arrive(book, 1.0, 0, 1)
    book.learn(replace(cluster_info("c"), status=ClusterStatus.ABORTED), 2.0)
    assert "build:c-0" not in book
    assert book.leave("build:c-0") is None


def test_a_job_that_is_no_member_of_the_cluster_it_names_is_not_kept() -> None:
    book = ClusterBook()
    book.learn(cluster_info("c"), 0.0)
    book.arrive(build("other", cluster="c"), 1.0)
    assert "build:other" not in book
