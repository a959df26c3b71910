"""Policies: tables of rules, and the sum of them (scoring.md, "Traits"; policies.md, tables)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog

from gradient_server.scoring.breakdown import ScoreBreakdown
from gradient_server.scoring.columns import Flags, JobColumns, Points, Vector, at
from gradient_server.scoring.contexts import InstanceContext, WorkerContext
from gradient_server.scoring.estimate import Estimate
from gradient_server.scoring.rule import Rule
from gradient_server.scoring.rules import (
    EstimatedTimeRule,
    FairShareRule,
    QosRule,
    RescoreWaitRule,
    ReserveFetchWorkersRule,
    ResourceSaturationRule,
    TransferLimitRule,
    WaitTimeRule,
)
from gradient_server.scoring.weights import ASSIGN_FLOOR

__all__ = [
    "DEFAULT_POLICY",
    "CatalogueEntry",
    "RulePolicy",
    "RuleSpec",
    "Scores",
    "ScoringPolicy",
    "policy_by_name",
    "resource_aware_table",
    "rule_catalogue",
    "simple_table",
]

log = structlog.get_logger(__name__)

DEFAULT_POLICY = "resource-aware"


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """One row of a policy's table."""

    enabled: bool
    rule: Rule


@dataclass(frozen=True, slots=True)
class Scores:
    """What a policy says of n candidates: totals, holds, and the points of each rule.

    `points` is in the order of `rule_names`; `holds` names each rule that holds some, and whom;
    `vetoed` is None where nobody is held; `waits` names those that a rule does not hold and that are to be
    waited for all the same, and is None for none.
    """

    rule_names: tuple[str, ...]
    points: tuple[Points, ...]
    total: Vector
    vetoed: Flags | None
    holds: tuple[tuple[str, Flags], ...]
    estimate: Estimate | None
    waits: Flags | None = None

    @property
    def wins(self) -> Flags:
        """Unvetoed and not below the floor."""
        flags: Flags = self.total >= ASSIGN_FLOOR
        return flags if self.vetoed is None else flags & ~self.vetoed

    def points_of(self, index: int) -> dict[str, float]:
        """One candidate's points by rule."""
        return {name: at(points, index) for name, points in zip(self.rule_names, self.points, strict=True)}

    def vetoes_of(self, index: int) -> tuple[str, ...]:
        """The rules that hold one candidate."""
        return tuple(name for name, flags in self.holds if flags[index])

    def breakdown(self, index: int) -> ScoreBreakdown:
        """One candidate's points by rule, total, vetoes and estimate."""
        return ScoreBreakdown(
            rules=self.points_of(index),
            total=float(self.total[index]),
            vetoes=self.vetoes_of(index),
            estimate=None if self.estimate is None else self.estimate.detail(index),
        )


class ScoringPolicy(Protocol):
    """What the scheduler asks."""

    name: str
    uses_history: bool

    @property
    def uses_project_work_share(self) -> bool:
        """Whether the jobs' project work shares must be filled in."""
        ...

    def score(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Vector:
        """The totals, one for each candidate."""
        ...

    def score_detailed(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Scores:
        """The same totals with every rule's part and the vetoes."""
        ...

    def held_unscored(
        self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext
    ) -> Flags | None:
        """The cheap holds alone: whom it names cannot win, and need not be scored."""
        ...


class RulePolicy:
    """A named list of rules, summed."""

    def __init__(self, name: str, rules: Sequence[Rule], *, uses_history: bool) -> None:
        self.name = name
        self.rules = tuple(rules)
        self.uses_history = uses_history
        self._names = tuple(rule.name for rule in self.rules)
        self._first = tuple(rule for rule in self.rules if rule.holds_unscored)

    @classmethod
    def from_table(cls, name: str, table: Sequence[RuleSpec], *, uses_history: bool) -> "RulePolicy":
        """The enabled rules of a table."""
        return cls(name, [spec.rule for spec in table if spec.enabled], uses_history=uses_history)

    @property
    def uses_project_work_share(self) -> bool:
        """Derived from the enabled rules."""
        return any(rule.uses_project_work_share for rule in self.rules)

    def score(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Vector:
        """The totals, one for each candidate."""
        return _sum((rule.score(columns, worker, instance) for rule in self.rules), len(columns))

    def score_detailed(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Scores:
        """The same totals with every rule's part and the vetoes."""
        points = tuple(rule.score(columns, worker, instance) for rule in self.rules)
        vetoed: Flags | None = None
        waits: Flags | None = None
        holds: list[tuple[str, Flags]] = []
        for rule in self.rules:
            flags = rule.veto(columns, worker, instance)
            if flags is not None:
                holds.append((rule.name, flags))
                vetoed = flags if vetoed is None else vetoed | flags
            flags = rule.waits(columns, worker, instance)
            if flags is not None:
                waits = flags if waits is None else waits | flags
        estimate = columns.memo.get("estimate")
        return Scores(
            rule_names=self._names,
            points=points,
            total=_sum(points, len(columns)),
            vetoed=vetoed,
            holds=tuple(holds),
            estimate=estimate if isinstance(estimate, Estimate) else None,
            waits=waits,
        )

    def held_unscored(
        self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext
    ) -> Flags | None:
        """The cheap holds alone: whom it names cannot win, and need not be scored."""
        held: Flags | None = None
        for rule in self._first:
            flags = rule.veto(columns, worker, instance)
            if flags is not None:
                held = flags if held is None else held | flags
        return held


def _sum(points: Iterable[Points], size: int) -> Vector:
    """The totals of `size` candidates; what is the same for all is added last."""
    total: Vector | None = None
    same = 0.0
    for part in points:
        if isinstance(part, float):
            same += part
        elif total is None:
            total = part.copy()
        else:
            total += part
    if total is None:
        return np.full(size, same)
    if same:
        total += same
    return total


def simple_table() -> list[RuleSpec]:
    """Time, waiting and quality of service; no memory, no shares."""
    return [
        RuleSpec(True, EstimatedTimeRule()),
        RuleSpec(True, RescoreWaitRule()),
        RuleSpec(True, WaitTimeRule()),
        RuleSpec(True, ReserveFetchWorkersRule()),
        RuleSpec(True, TransferLimitRule()),
        RuleSpec(True, QosRule()),
    ]


def resource_aware_table() -> list[RuleSpec]:
    """The simple table and what the hosts have left; every rule there is, disabled ones included."""
    return [
        *simple_table(),
        RuleSpec(True, ResourceSaturationRule()),
        RuleSpec(False, FairShareRule()),
    ]


def policy_by_name(name: str) -> RulePolicy:
    """The policy `scheduler.scoringPolicy` names; an unknown name falls back, with a warning."""
    if name == "simple":
        return RulePolicy.from_table(name, simple_table(), uses_history=False)
    if name != DEFAULT_POLICY:
        log.warning(
            "scheduler.scoringPolicy is not known: using " + DEFAULT_POLICY,
            given=name,
            known=["simple", DEFAULT_POLICY],
        )
    return RulePolicy.from_table(DEFAULT_POLICY, resource_aware_table(), uses_history=True)


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A rule as the board explains it."""

    name: str
    description: str
    enabled: bool


def rule_catalogue() -> list[CatalogueEntry]:
    """Every rule of the resource-aware table, disabled ones included."""
    return [
        CatalogueEntry(spec.rule.name, spec.rule.description, spec.enabled) for spec in resource_aware_table()
    ]
