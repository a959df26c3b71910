"""Numbered reports: who may report, in which order, and what is refused."""

from typing import Any

import pytest
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import FailureKind, SpanKind
from gradient_protocol.messages.shapes import (
    BuildOutput,
    BuiltOutput,
    Derivation,
    DerivationInput,
    EvalResult,
    EvalStats,
    Span,
)
from gradient_protocol.messages.worker import ClusterSignalReport, JobCompleted, JobFailed, JobUpdate
from gradient_server.domain.events import AssignmentClosed
from gradient_server.domain.job import eval_key
from gradient_server.graph.reports import apply_report, fail_unreadable_job, refuse_report

from tests.fixtures.graph import store_path
from tests.integration.graph.pool import INSTANCE, Pool, derivation, hash_of, metrics, output_path

STATS = EvalStats(derivations=1, known=0, wall_ms=5, cpu_ms=4)


async def evaluating(pool: Pool) -> tuple[str, str]:
    """An evaluation and its accepted assignment."""
    evaluation = await pool.submit()
    assignment = await pool.claim(eval_key(evaluation))
    assert assignment is not None
    return evaluation, assignment


async def building(pool: Pool, **fields: Any) -> str:  # noqa: ANN401 - many types
    """An accepted assignment of the one build of an evaluation."""
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a", **fields)])
    assignment = await pool.claim(await pool.key("a"))
    assert assignment is not None
    return assignment


async def test_a_report_that_comes_twice_changes_nothing(pool: Pool) -> None:
    _, assignment = await evaluating(pool)
    update = JobUpdate(assignment_id=assignment, seq=1, update=STATS)
    assert (await pool.report(update)).acknowledge == 1
    again = await pool.report(update)
    assert (again.acknowledge, again.events, again.error) == (1, [], None)
    assert await pool.scalar("SELECT COUNT(*) FROM evaluation_metric") == 1


async def test_a_gap_ends_the_session_and_applies_nothing(pool: Pool) -> None:
    _, assignment = await evaluating(pool)
    outcome = await pool.report(JobUpdate(assignment_id=assignment, seq=2, update=STATS))
    assert outcome.error is not None
    assert outcome.error[0] == 400
    assert await pool.scalar("SELECT COUNT(*) FROM evaluation_metric") == 0
    assert await pool.scalar("SELECT last_seq FROM dispatched_job") == 0


async def test_strangers_and_stale_ids_are_acknowledged_and_change_nothing(pool: Pool) -> None:
    evaluation, assignment = await evaluating(pool)
    completed = JobCompleted(assignment_id=assignment, seq=1, spans=[], spans_dropped=0)
    stranger = await pool.report(completed, worker="w2")
    assert (stranger.acknowledge, stranger.closed, stranger.events) == (1, False, [])
    unknown = JobCompleted(assignment_id="nobody", seq=7, spans=[], spans_dropped=0)
    assert (await pool.report(unknown)).acknowledge == 7
    assert await pool.evaluation_status(evaluation) == "Assigned"
    assert (await pool.report(completed)).closed
    late = JobFailed(
        assignment_id=assignment,
        seq=2,
        kind=FailureKind.PERMANENT,
        error="",
        missing_paths=[],
        spans=[],
        spans_dropped=0,
    )
    assert (await pool.report(late)).acknowledge == 2
    assert await pool.evaluation_status(evaluation) == "Completed"


async def test_an_instance_that_lost_the_assignment_acknowledges_nothing(pool: Pool) -> None:
    _, assignment = await evaluating(pool)
    outcome = await pool.report(
        JobUpdate(assignment_id=assignment, seq=1, update=STATS), instance="successor"
    )
    assert outcome.acknowledge == 0
    assert outcome.error is not None


async def test_an_update_without_a_number_is_no_report(pool: Pool, ids: IdSource) -> None:
    message = JobUpdate(assignment_id="x", seq=None, update=STATS)
    with pytest.raises(ValueError, match="numbered"):
        await pool.run(
            lambda c: apply_report(c, worker_id="w", instance_id=INSTANCE, message=message, now=1.0, ids=ids)
        )


async def test_after_a_refusal_only_the_permanent_failure_counts(pool: Pool) -> None:
    evaluation, assignment = await evaluating(pool)
    refused = await pool.batch(assignment, derivation("a", "nobody"))
    assert refused.refused is not None
    assert "nobody" in refused.refused
    assert refused.error is None
    # What the worker had sent after it, before it heard of the refusal: dropped, and no gap.
    for message in (
        JobUpdate(assignment_id=assignment, seq=1, update=STATS),
        JobUpdate(assignment_id=assignment, seq=2, update=STATS),
        JobCompleted(assignment_id=assignment, seq=3, spans=[], spans_dropped=0),
    ):
        outcome = await pool.report(message)
        assert (outcome.acknowledge, outcome.error, outcome.closed, outcome.refused) == (0, None, False, None)
    failed = JobFailed(
        assignment_id=assignment,
        seq=1,
        kind=FailureKind.PERMANENT,
        error="refused",
        missing_paths=[],
        spans=[],
        spans_dropped=0,
    )
    outcome = await pool.report(failed)
    assert (outcome.acknowledge, outcome.closed) == (1, True)
    assert await pool.evaluation_status(evaluation) == "Failed"
    assert await pool.scalar("SELECT COUNT(*) FROM derivation") == 0


async def test_content_that_could_not_be_decoded_is_refused_under_its_number(pool: Pool) -> None:
    evaluation, assignment = await evaluating(pool)
    worker_id = await pool.worker("w1")

    async def refuse(seq: int) -> tuple[str | None, int, bool]:
        outcome = await pool.run(
            lambda c: refuse_report(
                c,
                worker_id=worker_id,
                instance_id=INSTANCE,
                assignment_id=assignment,
                seq=seq,
                reason="ill-typed",
                now=pool.clock.now(),
                ids=pool.ids,
            )
        )
        return outcome.refused, outcome.acknowledge, outcome.error is not None

    assert await refuse(2) == (None, 0, True)
    assert await refuse(1) == ("ill-typed", 0, False)
    assert await refuse(2) == (None, 0, False)
    await pool.fail(assignment, FailureKind.PERMANENT)
    assert await pool.evaluation_status(evaluation) == "Failed"


async def test_a_job_that_the_worker_cannot_read_fails_for_good(pool: Pool) -> None:
    assignment = await building(pool)
    worker_id = await pool.worker("w1")
    events = await pool.run(
        lambda c: fail_unreadable_job(
            c,
            worker_id=worker_id,
            instance_id=INSTANCE,
            assignment_id=assignment,
            reason="no such field",
            now=pool.clock.now(),
            ids=pool.ids,
        )
    )
    assert any(isinstance(event, AssignmentClosed) for event in events)
    assert await pool.statuses() == {"a": "Failed"}


async def test_a_signal_outside_an_attempt_is_acknowledged_and_dropped(pool: Pool) -> None:
    assignment = await building(pool)
    worker_id = await pool.worker("w1")
    signal = ClusterSignalReport(assignment_id=assignment, seq=1, attempt="none", topic="t", payload=b"")
    outcome = await pool.run(
        lambda c: apply_report(
            c, worker_id=worker_id, instance_id=INSTANCE, message=signal, now=pool.clock.now(), ids=pool.ids
        )
    )
    assert (outcome.acknowledge, outcome.error, outcome.refused) == (1, None, None)


async def test_a_completion_whose_outputs_are_not_held_is_a_transient_failure(pool: Pool) -> None:
    assignment = await building(pool)
    await pool.output(assignment, await pool.job(await pool.key("a")))
    outcome = await pool.complete(assignment)
    assert (outcome.closed, outcome.acknowledge) == (True, 2)
    assert await pool.statuses() == {"a": "Queued"}
    assert pool.queued[await pool.key("a")].not_before == pool.clock.now() + 30
    assert "not in the server's store" in await pool.scalar("SELECT error FROM build_attempt")


async def test_what_is_held_is_what_is_recorded(pool: Pool) -> None:
    assignment = await building(pool)
    await pool.output(assignment, await pool.job(await pool.key("a")))
    # Another worker was first, with other bytes.
    await pool.hold(output_path("a"), nar_hash=hash_of("other"))
    await pool.complete(assignment)
    assert await pool.statuses() == {"a": "Completed"}
    assert await pool.scalar("SELECT nar_hash FROM derivation_output") == hash_of("other")


def built(name: str = "out", path: str | None = None, **fields: Any) -> BuiltOutput:  # noqa: ANN401 - many types
    """An output as it was built."""
    fields = {"nar_hash": hash_of("x"), "nar_size": 1, "references": [], **fields}
    return BuiltOutput(name=name, path=path or output_path("a"), contains_store_dir=False, **fields)


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([built("doc")], "no output 'doc'"),
        ([built(path=output_path("b"))], "no output 'out' at"),
        ([built(nar_hash="md5:1")], "nar_hash"),
        ([built(nar_size=10**18)], "nar_size is no size"),
        ([], "not every output"),
    ],
)
async def test_outputs_that_cannot_be_are_refused(
    pool: Pool, outputs: list[BuiltOutput], reason: str
) -> None:
    assignment = await building(pool)
    update = BuildOutput(outputs=outputs, products=[], substituted=False)
    outcome = await pool.update(assignment, update)
    assert outcome.refused is not None
    assert reason in outcome.refused
    assert await pool.scalar("SELECT nar_hash FROM derivation_output") is None


@pytest.mark.parametrize(("substituted", "rows"), [(False, 1), (True, 0)])
async def test_only_real_builds_leave_a_row_of_metrics(pool: Pool, substituted: bool, rows: int) -> None:
    assignment = await building(pool)
    await pool.output(assignment, await pool.job(await pool.key("a")), substituted=substituted)
    assert await pool.scalar("SELECT COUNT(*) FROM derivation_metric") == rows
    assert bool(await pool.scalar("SELECT substituted FROM derivation_build")) is substituted


async def test_spans_are_stored_as_far_as_they_make_sense(pool: Pool) -> None:
    _, assignment = await evaluating(pool)
    good = Span(kind=SpanKind.EVALUATION, start=1.0, end=2.0)
    child = Span(kind=SpanKind.IMPORT_WAIT, start=1.0, end=1.5, parent=0)
    backwards = Span(kind=SpanKind.FETCH, start=2.0, end=1.0)
    endless = Span(kind=SpanKind.FETCH, start=float("nan"), end=1.0)
    await pool.complete(assignment, spans=[good, child, backwards, endless, *[good] * 2_000])
    assert await pool.scalar("SELECT COUNT(*) FROM span") == 1_998
    assert await pool.scalar("SELECT spans_dropped FROM dispatched_job") == 6
    assert await pool.scalar("SELECT parent FROM span WHERE position = 1") == 0


async def test_an_evaluation_cannot_report_what_is_a_builds_and_the_other_way_round(pool: Pool) -> None:
    _, assignment = await evaluating(pool)
    outcome = await pool.update(assignment, BuildOutput(outputs=[], products=[], substituted=False))
    assert outcome.refused == "an evaluation has no BuildOutput"
    assignment = await building(pool)
    outcome = await pool.update(assignment, STATS)
    assert outcome.refused == "a build has no EvalStats"


def replaced(name: str = "a", **fields: Any) -> Derivation:  # noqa: ANN401 - many types
    """A derivation with some fields replaced."""
    whole = derivation(name)
    return Derivation(**{field: getattr(whole, field) for field in whole.__struct_fields__} | fields)


def needs(name: str, *outputs: str) -> list[DerivationInput]:
    """An input by name."""
    drv_path = store_path(f"{name}.drv")
    return [DerivationInput(drv_path=drv_path, outputs=list(outputs), runtime_only=False, name=name)]


@pytest.mark.parametrize(
    ("derivations", "reason"),
    [
        ([derivation("a"), derivation("b", "nobody")], "is not known"),
        ([derivation("a"), replaced("b", inputs=needs("a", "doc"))], "has no output 'doc'"),
        ([derivation("a", "b"), derivation("b", "a")], "in a circle"),
    ],
)
async def test_batches_that_cannot_be_are_refused_whole(
    pool: Pool, derivations: list[Derivation], reason: str
) -> None:
    _, assignment = await evaluating(pool)
    outcome = await pool.batch(assignment, *derivations)
    assert outcome.refused is not None
    assert reason in outcome.refused
    assert await pool.scalar("SELECT COUNT(*) FROM derivation") == 0


async def test_an_input_may_be_stored_by_an_earlier_batch(pool: Pool) -> None:
    _, assignment = await evaluating(pool)
    assert (await pool.batch(assignment, derivation("a"))).refused is None
    bad = await pool.batch(assignment, replaced("b", inputs=needs("a", "doc")))
    assert bad.refused is not None
    assert "has no output 'doc'" in bad.refused


async def test_preferences_follow_the_latest_evaluation_and_content_does_not(pool: Pool) -> None:
    await pool.evaluate(await pool.submit(), [derivation("a", timeout_secs=1.0)])
    await pool.evaluate(await pool.submit(), [replaced(timeout_secs=2.0, prefer_local=True, system="other")])
    row = await pool.run(
        lambda c: c.exec_driver_sql("SELECT timeout_secs, prefer_local, system FROM derivation").one()
    )
    assert (row[0], bool(row[1]), row[2]) == (2.0, True, "any")


async def test_a_killed_build_leaves_its_peak_behind(pool: Pool) -> None:
    assignment = await building(pool)
    await pool.fail(assignment, FailureKind.OUT_OF_MEMORY, used=metrics(peak_ram_mb=500, oom_killed=True))
    assert await pool.scalar("SELECT peak_ram_mb FROM derivation_metric") == 500
    assert await pool.scalar("SELECT peak_ram_mb FROM derivation_build") == 500
    assert await pool.statuses() == {"a": "Failed"}


async def test_an_evaluation_that_ended_ignores_what_its_job_still_reports(pool: Pool) -> None:
    evaluation, assignment = await evaluating(pool)
    await pool.scalar(
        "UPDATE evaluation SET status = 'Aborted', finished_at = 1 WHERE id = :id RETURNING id", id=evaluation
    )
    result = EvalResult(derivations=[derivation("a")], clusters=[], warnings=[], errors=[])
    outcome = await pool.update(assignment, result)
    assert (outcome.acknowledge, outcome.refused) == (1, None)
    assert await pool.scalar("SELECT COUNT(*) FROM derivation") == 0
    assert (await pool.complete(assignment)).closed
    assert await pool.evaluation_status(evaluation) == "Aborted"
