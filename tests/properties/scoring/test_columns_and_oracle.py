"""The columns say what the text says: against a plain scalar oracle, unknowns included."""

import math

import hypothesis.strategies as st
import numpy as np
from gradient_server.scoring.policy import RulePolicy, policy_by_name, resource_aware_table
from hypothesis import given, settings

from tests.properties.scoring.bridge import columns_of, instance_of, worker_of
from tests.properties.scoring.oracle import Instance, Job, Worker, score

ALL_RULES = RulePolicy("all", [spec.rule for spec in resource_aware_table()], uses_history=True)


def maybe(strategy: st.SearchStrategy[float]) -> st.SearchStrategy[float | None]:
    return st.one_of(st.none(), strategy)


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.one_of(st.integers(math.ceil(low), int(high)).map(float), st.floats(low, high))


BYTES = st.one_of(st.integers(0, 3_000_000), st.integers(0, 10**12))
MB = st.one_of(st.integers(0, 20_000), st.sampled_from([0, 800, 8000, 16_000]))
SPEEDS = numbers(0.01, 100_000.0)
NOW = 10_000.0

JOBS = st.builds(
    Job,
    is_build=st.booleans(),
    cached=st.booleans(),
    builtin=st.booleans(),
    fixed_output=st.booleans(),
    ready_at=st.one_of(st.just(NOW), numbers(0.0, NOW + 100)),
    now=st.just(NOW),
    prioritized=st.booleans(),
    build_request=st.booleans(),
    ifd=st.booleans(),
    rescore_count=st.integers(0, 6),
    substitute_outputs=st.one_of(st.none(), st.none(), st.integers(1, 5)),
    own_output_size=maybe(BYTES),
    own_peak_mb=maybe(MB),
    missing_count=maybe(st.integers(0, 10_000)),
    missing_bytes=maybe(BYTES),
    outputs_present=st.booleans(),
    share=maybe(numbers(0.0, 1.0)),
    peak_mb=maybe(MB),
    output_size=maybe(BYTES),
    oom_rate=maybe(st.floats(0.0, 1.0)),
    uncontended_ms=maybe(numbers(0.0, 1e7)),
    core_score=maybe(numbers(1.0, 20_000.0)),
    pool_total_mb=maybe(MB),
    pool_releasable_mb=maybe(MB),
)
WORKERS = st.builds(
    Worker,
    fetch=st.booleans(),
    core_score=maybe(numbers(1.0, 20_000.0)),
    total_mb=maybe(MB),
    free_mb=maybe(MB),
    cpu_pct=maybe(st.one_of(st.sampled_from([79.9, 80.0, 90.0]), numbers(0.0, 100.0))),
    up_mbps=maybe(SPEEDS),
    down_mbps=maybe(SPEEDS),
    running=st.integers(0, 64),
    assigned=st.integers(0, 3),
    reserved_mb=st.one_of(st.just(0.0), numbers(0.0, 20_000.0)),
    unused_mb=numbers(0.0, 20_000.0),
    kept_mb=st.one_of(st.just(0.0), numbers(0.0, 4000.0)),
)
INSTANCES = st.builds(
    Instance,
    wait_secs=maybe(st.one_of(st.just(0.0), numbers(0.1, 10_000.0))),
    nar_mb=maybe(numbers(0.0, 10_000.0)),
    paths=maybe(numbers(0.0, 1000.0)),
    read_mbps=maybe(SPEEDS),
    write_mbps=maybe(SPEEDS),
    stored_ratio=maybe(numbers(0.05, 1.0)),
    per_path=maybe(numbers(0.0, 5.0)),
    substitute=st.one_of(st.none(), st.tuples(numbers(0.0, 5.0), numbers(0.0, 1.0))),
    build_ms_1h=maybe(numbers(0.0, 1e7)),
    build_ms_24h=maybe(numbers(0.0, 1e7)),
    peak_1h=maybe(numbers(0.0, 20_000.0)),
    peak_24h=maybe(numbers(0.0, 20_000.0)),
    total_workers=st.integers(0, 10),
    idle_workers=st.integers(0, 10),
    core_mean=maybe(numbers(1.0, 20_000.0)),
    up_mean=maybe(SPEEDS),
    down_mean=maybe(SPEEDS),
    download_slots=st.integers(0, 3),
    upload_slots=st.integers(0, 3),
    downloads=st.integers(0, 5),
    uploads=st.integers(0, 5),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(JOBS, min_size=1, max_size=5), WORKERS, INSTANCES)
def test_every_rule_agrees_with_the_text(jobs: list[Job], worker: Worker, instance: Instance) -> None:
    scores = ALL_RULES.score_detailed(columns_of(jobs), worker_of(worker), instance_of(instance))
    for place, job in enumerate(jobs):
        expected = score(job, worker, instance)
        got = scores.breakdown(place)
        assert set(got.vetoes) == expected.vetoes
        for name, points in expected.rules.items():
            assert math.isclose(got.rules[name], points, rel_tol=1e-9, abs_tol=1e-6), (name, job)
        assert math.isclose(got.total, math.fsum(expected.rules.values()), rel_tol=1e-9, abs_tol=1e-6)
        assert math.isfinite(got.total)


@settings(max_examples=100, deadline=None)
@given(st.lists(JOBS, min_size=2, max_size=6), WORKERS, INSTANCES)
def test_a_job_alone_is_a_batch_of_one(jobs: list[Job], worker: Worker, instance: Instance) -> None:
    policy = policy_by_name("resource-aware")
    contexts = worker_of(worker), instance_of(instance)
    together = policy.score_detailed(columns_of(jobs), *contexts)
    for place, job in enumerate(jobs):
        alone = policy.score_detailed(columns_of([job]), *contexts)
        assert alone.breakdown(0) == together.breakdown(place)
    assert np.array_equal(policy.score(columns_of(jobs), *contexts), together.total)
