"""The verdict table of cluster-jobs.md, Recovery, row by row."""

import pytest
from gradient_server.cluster.verdict import MemberReport, MemberState, Verdict, decide

S = MemberState


def report(state: MemberState, *, primary: bool = False, can_start: bool = True) -> MemberReport:
    return MemberReport(role="r", index=0, primary=primary, state=state, can_start=can_start)


def verdict(
    *reports: MemberReport, attempts: int = 1, retry_budget: int = 1, aborted: bool = False
) -> Verdict | None:
    return decide(reports, attempts=attempts, retry_budget=retry_budget, evaluation_aborted=aborted)


def test_complete_every_member_succeeded() -> None:
    assert verdict(report(S.SUCCEEDED), report(S.SUCCEEDED)) is Verdict.COMPLETE


def test_complete_the_primary_succeeded() -> None:
    assert verdict(report(S.SUCCEEDED, primary=True), report(S.RUNNING)) is Verdict.COMPLETE


def test_a_success_of_another_member_decides_nothing() -> None:
    assert verdict(report(S.SUCCEEDED), report(S.RUNNING, primary=True)) is None
    assert verdict(report(S.SUCCEEDED), report(S.HELD)) is None


@pytest.mark.parametrize("state", [S.FAILED, S.LOST, S.ABORTED])
def test_retry_a_member_failed_or_was_lost_with_budget_left(state: MemberState) -> None:
    assert verdict(report(state), report(S.RUNNING, primary=True)) is Verdict.RETRY


def test_fail_without_budget() -> None:
    assert verdict(report(S.FAILED), report(S.RUNNING), attempts=2) is Verdict.FAIL
    assert verdict(report(S.FAILED), report(S.RUNNING), retry_budget=0) is Verdict.FAIL


def test_fail_where_a_member_can_no_longer_start() -> None:
    assert verdict(report(S.FAILED), report(S.RUNNING, can_start=False)) is Verdict.FAIL


def test_abort_an_evaluation_abort_reached_a_member() -> None:
    assert verdict(report(S.RUNNING), report(S.RUNNING), aborted=True) is Verdict.ABORT


def test_the_first_deciding_report_wins() -> None:
    primary, failed = report(S.SUCCEEDED, primary=True), report(S.FAILED)
    assert verdict(primary, failed) is Verdict.COMPLETE
    assert verdict(failed, primary) is Verdict.RETRY
