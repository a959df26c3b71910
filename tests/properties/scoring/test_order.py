"""Ranking is a total order, and a score moves the way that the text implies."""

import random
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
from gradient_server.scheduler.selection import best, in_order
from hypothesis import given, settings

from tests.properties.scoring.bridge import columns_of, instance_of, worker_of
from tests.properties.scoring.oracle import Instance, Job, Worker
from tests.properties.scoring.test_columns_and_oracle import (
    ALL_RULES,
    BYTES,
    INSTANCES,
    JOBS,
    WORKERS,
    numbers,
)

TOTALS = st.one_of(st.sampled_from([-3600.0, -0.0, 0.0, 60.0]), st.floats(-20_000, 20_000))
# Few totals, so that many are equal, and ids that sort otherwise than they are made.
CANDIDATES = st.dictionaries(
    st.text("ab0", min_size=1, max_size=4), st.tuples(TOTALS, st.booleans()), min_size=1
)


@settings(max_examples=200, deadline=None)
@given(CANDIDATES, st.randoms(use_true_random=False), st.integers(1, 8))
def test_the_order_is_total_and_depends_on_nothing_but_total_and_id(
    candidates: dict[str, tuple[float, bool]], dice: random.Random, limit: int
) -> None:
    expected = sorted(candidates, key=lambda job_id: (-candidates[job_id][0], job_id))
    passing = [job_id for job_id in expected if candidates[job_id][1]]
    job_ids = list(candidates)
    for _ in range(3):
        dice.shuffle(job_ids)
        total = np.array([candidates[job_id][0] for job_id in job_ids])
        wins = np.array([candidates[job_id][1] for job_id in job_ids])
        ranked = in_order(total, job_ids, np.arange(len(job_ids)), len(job_ids))
        assert [job_ids[place] for place in ranked] == expected
        assert in_order(total, job_ids, np.arange(len(job_ids)), limit) == ranked[:limit]
        chosen = best(total, wins, job_ids)
        assert (None if chosen is None else job_ids[chosen]) == (passing[0] if passing else None)


def moved(job: Job, worker: Worker, instance: Instance, **changes: object) -> float:
    """By how many points the changes raise the job's total."""
    pair = columns_of([job, replace(job, **changes)])
    before, after = ALL_RULES.score(pair, worker_of(worker), instance_of(instance))
    return float(after - before)


# Points that differ by less were lost in the sum of thousands.
NOTHING = 1e-6


@settings(max_examples=100, deadline=None)
@given(JOBS, WORKERS, INSTANCES, BYTES, BYTES)
def test_more_missing_bytes_or_outputs_never_raise_a_score(
    job: Job, worker: Worker, instance: Instance, size: int, more: int
) -> None:
    job = replace(job, missing_bytes=size, own_output_size=size)
    assert moved(job, worker, instance, missing_bytes=size + more) <= NOTHING
    assert moved(job, worker, instance, own_output_size=size + more) <= NOTHING


@settings(max_examples=100, deadline=None)
@given(JOBS, WORKERS, INSTANCES, st.integers(0, 10_000), st.integers(0, 10_000))
def test_more_missing_paths_or_a_longer_run_never_raise_a_score(
    job: Job, worker: Worker, instance: Instance, few: int, more: int
) -> None:
    job = replace(job, missing_count=few, uncontended_ms=few * 1000.0)
    assert moved(job, worker, instance, missing_count=few + more) <= NOTHING
    assert moved(job, worker, instance, uncontended_ms=(few + more) * 1000.0) <= NOTHING


@settings(max_examples=100, deadline=None)
@given(JOBS, WORKERS, INSTANCES, numbers(0.0, 100_000.0))
def test_more_wait_never_lowers_a_score(job: Job, worker: Worker, instance: Instance, secs: float) -> None:
    assert moved(job, worker, instance, ready_at=job.ready_at - secs) >= -NOTHING


@settings(max_examples=100, deadline=None)
@given(JOBS, WORKERS, INSTANCES, numbers(0.0, 1.0))
def test_a_wish_of_the_user_raises_a_score_and_a_larger_share_never_does(
    job: Job, worker: Worker, instance: Instance, share: float
) -> None:
    for name in ("prioritized", "build_request", "ifd"):
        job = replace(job, **{name: False})
        assert moved(job, worker, instance, **{name: True}) >= 1000.0 - NOTHING
    job = replace(job, share=share)
    assert moved(job, worker, instance, share=1.0) <= NOTHING
