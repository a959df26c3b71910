"""The states of what the database keeps, spelled as they are stored and shown."""

import enum

__all__ = [
    "AbortReason",
    "AssignmentStatus",
    "AttemptOutcome",
    "BuildStatus",
    "ClusterStatus",
    "EvaluationStatus",
]


class EvaluationStatus(enum.StrEnum):
    """An evaluation from submission to its final state.

    Queued: its job waits for a worker (again, after the fetch half of a split job). Assigned: a
    worker has it. Building: the graph is complete and builds are outstanding. The others are final.
    """

    QUEUED = "Queued"
    ASSIGNED = "Assigned"
    BUILDING = "Building"
    COMPLETED = "Completed"
    FAILED = "Failed"
    ABORTED = "Aborted"

    @property
    def is_final(self) -> bool:
        """Whether nothing changes this evaluation any more."""
        return self in (EvaluationStatus.COMPLETED, EvaluationStatus.FAILED, EvaluationStatus.ABORTED)


class BuildStatus(enum.StrEnum):
    """A shared build (`derivation_build`) from its creation to its final state.

    Created: waits for dependencies. Queued: every dependency succeeded (`ready_at`). Assigned: a
    worker has it. The other four are final; Completed alone can be reset, by the self-heal of a
    missing input.
    """

    CREATED = "Created"
    QUEUED = "Queued"
    ASSIGNED = "Assigned"
    COMPLETED = "Completed"
    FAILED = "Failed"
    ABORTED = "Aborted"
    DEPENDENCY_FAILED = "DependencyFailed"

    @property
    def is_final(self) -> bool:
        """Whether the build has ended."""
        return self not in (BuildStatus.CREATED, BuildStatus.QUEUED, BuildStatus.ASSIGNED)


class AssignmentStatus(enum.StrEnum):
    """A `dispatched_job` row. All but the first two are closed (`finished_at` is set)."""

    ASSIGNED = "Assigned"
    ACCEPTED = "Accepted"
    COMPLETED = "Completed"
    FAILED = "Failed"
    REJECTED = "Rejected"
    ABANDONED = "Abandoned"


class AbortReason(enum.StrEnum):
    """Why the server asked for an abort; it decides what follows (protocol.md, Lost connections).

    User and Evaluation: no retry. Revoked, Drained and Unanswered: requeued without using an
    attempt. Cluster: the verdict of the attempt decides.
    """

    USER = "User"
    EVALUATION = "Evaluation"
    REVOKED = "Revoked"
    DRAINED = "Drained"
    UNANSWERED = "Unanswered"
    CLUSTER = "Cluster"


class ClusterStatus(enum.StrEnum):
    """A cluster job (cluster-jobs.md, Tables)."""

    QUEUED = "Queued"
    RUNNING = "Running"
    COMPLETED = "Completed"
    FAILED = "Failed"
    ABORTED = "Aborted"

    @property
    def is_final(self) -> bool:
        """Whether it has ended; one that has may be wanted, and so Queued, again."""
        return self in (ClusterStatus.COMPLETED, ClusterStatus.FAILED, ClusterStatus.ABORTED)


class AttemptOutcome(enum.StrEnum):
    """How one try of a cluster ended (cluster-jobs.md, Tables)."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    PREPARE_FAILED = "PrepareFailed"
    ABORTED = "Aborted"
