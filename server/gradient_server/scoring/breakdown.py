"""Why a candidate got its total: kept in `dispatched_job.score_breakdown` and shown to people."""

from dataclasses import dataclass

__all__ = ["RunnerUp", "ScoreBreakdown"]


@dataclass(frozen=True, slots=True)
class ScoreBreakdown:
    """Points by rule, their sum, the rules that hold, and the estimate's parts where one was made."""

    rules: dict[str, float]
    total: float
    vetoes: tuple[str, ...] = ()
    estimate: dict[str, object] | None = None

    def as_json(self) -> dict[str, object]:
        """The recorded form."""
        recorded: dict[str, object] = {
            "rules": dict(self.rules),
            "total": self.total,
            "vetoes": list(self.vetoes),
        }
        if self.estimate is not None:
            recorded["estimate"] = dict(self.estimate)
        return recorded


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """Who would have been assigned instead: its points by rule, and their sum."""

    job_id: str
    total: float
    rules: dict[str, float]
