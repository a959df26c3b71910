"""Policies as tables, and what is recorded of them."""

import json

import numpy as np
import pytest
import structlog
from gradient_server.scoring import rules, weights
from gradient_server.scoring.columns import JobColumns
from gradient_server.scoring.contexts import InstanceContext, Windowed, WorkerContext, WorkerMetricsView
from gradient_server.scoring.policy import (
    RulePolicy,
    policy_by_name,
    resource_aware_table,
    rule_catalogue,
)
from gradient_server.scoring.rules import FairShareRule, QosRule

from tests.fakes.scheduler import START, build, evaluation

SIMPLE = [
    "EstimatedTimeRule",
    "RescoreWaitRule",
    "WaitTimeRule",
    "ReserveFetchWorkersRule",
    "TransferLimitRule",
    "QosRule",
]


def test_the_tables_are_those_of_the_policies_page() -> None:
    simple, aware = policy_by_name("simple"), policy_by_name("resource-aware")
    assert [rule.name for rule in simple.rules] == SIMPLE
    assert [rule.name for rule in aware.rules] == [*SIMPLE, "ResourceSaturationRule"]
    assert (simple.uses_history, aware.uses_history) == (False, True)
    assert [spec.rule.name for spec in resource_aware_table() if not spec.enabled] == ["FairShareRule"]
    assert [entry.name for entry in rule_catalogue()] == [*SIMPLE, "ResourceSaturationRule", "FairShareRule"]
    assert all(entry.description.endswith(".") for entry in rule_catalogue())


def test_every_rule_is_in_the_full_table() -> None:
    exported = {getattr(rules, name).name for name in rules.__all__}
    assert exported == {spec.rule.name for spec in resource_aware_table()}


def test_the_work_share_is_used_where_a_rule_reads_it() -> None:
    assert not policy_by_name("resource-aware").uses_project_work_share
    assert RulePolicy("fair", [QosRule(), FairShareRule()], uses_history=False).uses_project_work_share


def test_an_unknown_name_warns_and_falls_back() -> None:
    with structlog.testing.capture_logs() as logs:
        assert policy_by_name("fancy").name == "resource-aware"
        assert policy_by_name("simple").name == "simple"
    [entry] = logs
    assert (entry["log_level"], entry["given"]) == ("warning", "fancy")


def test_the_magnitudes_keep_their_relations() -> None:
    # Nothing starves behind shorter jobs; no wait outweighs a saturated host.
    assert weights.WAIT_TIME_CAP > weights.ESTIMATED_TIME_CAP_SECS
    assert weights.RESOURCE_SATURATION_PENALTY > weights.ESTIMATED_TIME_CAP_SECS + weights.WAIT_TIME_CAP
    assert weights.TRANSFER_LIMIT_HOLD < weights.WAIT_TIME_CAP


def test_a_breakdown_is_plain_json_and_sums_up() -> None:
    columns = JobColumns.of([build("x", prioritized=True)], now=START + 60)
    scores = policy_by_name("resource-aware").score_detailed(columns, WorkerContext(), InstanceContext())
    recorded = json.loads(json.dumps(scores.breakdown(0).as_json(), allow_nan=False))
    assert recorded["vetoes"] == ["RescoreWaitRule"]
    assert sum(recorded["rules"].values()) == recorded["total"] == 3600 + 60 + 5000
    assert recorded["estimate"]["fallbacks"] == ["download_speed", "upload_speed", "missing", "history"]


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_batch_of_any_size_is_scored(count: int) -> None:
    columns = JobColumns.of([build(str(number)) for number in range(count)], now=START)
    for name in ("simple", "resource-aware"):
        scores = policy_by_name(name).score_detailed(columns, WorkerContext(), InstanceContext())
        assert len(scores.total) == len(scores.wins) == count


def test_a_measured_zero_is_not_unknown() -> None:
    assert Windowed(w1h=0.0).w1h_or(60.0) == 0.0
    assert Windowed().w1h_or(60.0) == 60.0
    assert Windowed(w24h=5.0).w24h_or(1.0) == 5.0
    columns = JobColumns.of([build("x")], now=START + 1)
    policy = policy_by_name("simple")
    no_wait = policy.score_detailed(columns, WorkerContext(), InstanceContext(wait_secs=Windowed(w1h=0.0)))
    assert no_wait.points_of(0)["WaitTimeRule"] == weights.WAIT_TIME_CAP


def test_what_is_available_is_the_lower_of_measured_and_booked() -> None:
    def available(**known: float) -> float:
        return WorkerMetricsView(ram_total_mb=16_000.0, ram_reserved_mb=6_000.0, **known).ram_available_mb

    assert available(ram_free_mb=12_000.0, ram_reserved_unused_mb=5_000.0) == 7_000
    assert available(ram_free_mb=15_000.0, ram_reserved_unused_mb=1_000.0) == 10_000
    assert available(ram_reserved_for_waiting_build_mb=500.0) == 9_500
    assert np.isnan(WorkerMetricsView().ram_available_mb)


def test_fetching_workers_are_left_to_evaluations_that_must_fetch() -> None:
    from gradient_protocol.kinds import EvalStep

    cached = evaluation("cached", steps=(EvalStep.EVALUATE,))
    columns = JobColumns.of([cached, evaluation("whole")], now=START)
    busy = InstanceContext(total_workers=4, idle_workers=1)
    scores = policy_by_name("simple").score_detailed(columns, WorkerContext(fetch=True), busy)
    rule = "ReserveFetchWorkersRule"
    assert [scores.points_of(place)[rule] for place in (0, 1)] == [-225.0, 0.0]
