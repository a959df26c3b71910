"""One rule: points for each candidate, and a hold."""

from typing import Protocol

from gradient_server.scoring.columns import Flags, JobColumns, Points
from gradient_server.scoring.contexts import InstanceContext, WorkerContext

__all__ = ["Rule", "ScoreRule"]


class Rule(Protocol):
    """What a policy is made of. Rules are pure: no clock, no state, unknown inputs add nothing."""

    name: str
    """Recorded in breakdowns and in the catalogue: never changed once released."""
    description: str
    uses_project_work_share: bool
    holds_unscored: bool
    """The veto alone, without any score, is cheap enough to thin out candidates first."""

    def score(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Points:
        """Points for each candidate, all finite; one number where all get the same."""
        ...

    def veto(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Flags | None:
        """True: not now, whatever the sum. None: the rule holds none of them."""
        ...

    def waits(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Flags | None:
        """Not held, and still to be waited for by the worker as if it were. None: none of them."""
        ...


class ScoreRule:
    """Defaults: a rule that reads no shares and holds nothing."""

    name = ""
    description = ""
    uses_project_work_share = False
    holds_unscored = False

    def veto(
        self,
        columns: JobColumns,  # noqa: ARG002 - the interface of a rule
        worker: WorkerContext,  # noqa: ARG002 - the interface of a rule
        instance: InstanceContext,  # noqa: ARG002 - the interface of a rule
    ) -> Flags | None:
        """Never holds."""
        return None

    def waits(
        self,
        columns: JobColumns,  # noqa: ARG002 - the interface of a rule
        worker: WorkerContext,  # noqa: ARG002 - the interface of a rule
        instance: InstanceContext,  # noqa: ARG002 - the interface of a rule
    ) -> Flags | None:
        """Nothing to wait for but what is held."""
        return None
