"""The clusters that wait, and their members under their own keys (cluster-jobs.md, Tracking).

A member that can start waits here until every other member of its cluster can, too. A cluster can
start once all have arrived, its status is Queued, no attempt of it is open, and the 30 s after a failed
prepare and the backoffs of its members have passed. A member that leaves holds its cluster back until
it comes again. All times are monotonic seconds unless said otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gradient_server.cluster.instructions import Ending
from gradient_server.domain.cluster import ClusterInfo, MemberInfo
from gradient_server.domain.job import PendingJob
from gradient_server.domain.status import ClusterStatus

__all__ = ["AFTER_FAILED_PREPARE_SECS", "ClusterBook", "Entry"]

AFTER_FAILED_PREPARE_SECS: Final = 30.0


@dataclass(slots=True)
class Entry:
    """One cluster. `ready_since`: its last member's arrival, from which it ages towards a reservation.

    Only a started attempt, or a member that leaves by itself, restarts the aging.
    """

    info: ClusterInfo
    arrived: dict[str, PendingJob] = field(default_factory=dict)
    due_at: dict[str, float] = field(default_factory=dict)
    ready_since: float | None = None
    not_before: float = 0.0
    attempt_id: str | None = None
    # The last failed prepare, for people.
    last_failure: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every member arrived."""
        return len(self.arrived) == len(self.info.members)

    @property
    def startable_at(self) -> float:
        """When the last backoff has passed."""
        return max([self.not_before, *self.due_at.values()])

    def can_start(self, now: float) -> bool:
        """Whether only seats are wanting."""
        return (
            self.is_complete
            and self.attempt_id is None
            and self.info.status is ClusterStatus.QUEUED
            and self.startable_at <= now
        )

    def absent(self) -> list[MemberInfo]:
        """The members that cannot start yet."""
        return [member for member in self.info.members if member.job_key not in self.arrived]

    def jobs(self) -> list[PendingJob]:
        """The members' jobs, in the order of the cluster. KeyError while one is absent."""
        return [self.arrived[member.job_key] for member in self.info.members]


class ClusterBook:
    """Every cluster that has not ended, as far as this instance knows."""

    def __init__(self) -> None:
        self.clusters: dict[str, Entry] = {}
        # Members that arrived before anything was known of their cluster.
        self._early: dict[str, dict[str, tuple[PendingJob, float]]] = {}
        self._cluster_of: dict[str, str] = {}
        # Complete, and without an attempt; their backoff may run.
        self._ready: dict[str, Entry] = {}

    def __contains__(self, job_key: str) -> bool:
        """Whether the member waits here: it counts as tracked."""
        return job_key in self._cluster_of

    def get(self, cluster_id: str) -> Entry | None:
        """The cluster's entry."""
        return self.clusters.get(cluster_id)

    @property
    def has_waiting(self) -> bool:
        """Whether a cluster is complete and without an attempt; its backoff may run."""
        return bool(self._ready)

    def set_status(self, cluster_id: str, status: ClusterStatus) -> None:
        """The cluster's row has this status now."""
        entry = self.clusters.get(cluster_id)
        if entry is not None:
            entry.info = replace(entry.info, status=status)

    def unknown(self) -> list[str]:
        """Clusters with members here of which nothing else is known: to be loaded."""
        return list(self._early)

    def learn(self, info: ClusterInfo, now: float) -> None:
        """What the database has of a cluster; replaces what was known."""
        if info.status.is_final:
            self.forget(info.id)
            return
        entry = self.clusters.get(info.id)
        if entry is None:
            entry = self.clusters[info.id] = Entry(info)
        entry.info = info
        wanted = {member.job_key for member in info.members}
        for job_key in [key for key in entry.arrived if key not in wanted]:
            self.leave(job_key)
        for job, due_at in self._early.pop(info.id, {}).values():
            del self._cluster_of[job.job_id]
            self.arrive(job, now, due_at)
        self._note(entry)

    def arrive(self, job: PendingJob, now: float, due_at: float = 0.0) -> None:
        """A member can start, from `due_at` on. Replaces what was known of it."""
        if job.cluster is None:
            raise ValueError(f"{job.job_id} is a member of no cluster")
        self._cluster_of[job.job_id] = job.cluster
        entry = self.clusters.get(job.cluster)
        if entry is None:
            self._early.setdefault(job.cluster, {})[job.job_id] = (job, due_at)
            return
        if all(member.job_key != job.job_id for member in entry.info.members):
            del self._cluster_of[job.job_id]
            return
        entry.arrived[job.job_id] = job
        entry.due_at[job.job_id] = due_at
        if entry.is_complete and entry.ready_since is None:
            entry.ready_since = now
        self._note(entry)

    def leave(self, job_key: str) -> PendingJob | None:
        """The member can no longer start, or its attempt has it now."""
        cluster_id = self._cluster_of.pop(job_key, None)
        if cluster_id is None:
            return None
        entry = self.clusters.get(cluster_id)
        if entry is None:
            job, _ = self._early[cluster_id].pop(job_key)
            if not self._early[cluster_id]:
                del self._early[cluster_id]
            return job
        entry.due_at.pop(job_key, None)
        if entry.attempt_id is None:
            entry.ready_since = None
        left = entry.arrived.pop(job_key, None)
        self._note(entry)
        return left

    def waiting(self, now: float) -> list[Entry]:
        """The clusters able to start: prioritised first, then the oldest."""
        found = [entry for entry in self._ready.values() if entry.can_start(now)]
        return sorted(found, key=_turn)

    def next_startable(self, now: float) -> float | None:
        """When the next backoff of a complete cluster passes; None if none is running."""
        times = (entry.startable_at for entry in self._ready.values())
        return min((at for at in times if at > now), default=None)

    def take(self, cluster_id: str, attempt_id: str, now: float) -> list[PendingJob]:
        """The cluster has an attempt now: its members' jobs leave, in the order of the cluster.

        ValueError if it cannot start.
        """
        entry = self.clusters[cluster_id]
        if not entry.can_start(now):
            raise ValueError(f"cluster {cluster_id} cannot start")
        entry.attempt_id = attempt_id
        jobs = entry.jobs()
        for job in jobs:
            self.leave(job.job_id)
        return jobs

    def adopt(self, cluster_id: str, attempt_id: str) -> None:
        """An attempt that was under way before this instance started goes on."""
        entry = self.clusters[cluster_id]
        entry.attempt_id = attempt_id
        self._note(entry)

    def started(self, cluster_id: str) -> None:
        """The attempt started: the aging begins anew with the next try."""
        entry = self.clusters.get(cluster_id)
        if entry is not None:
            entry.ready_since = None
            entry.last_failure = None

    def give_back(self, cluster_id: str, ending: Ending, reason: str, now: float) -> None:
        """The attempt is over. What arrived meanwhile counts, and so does a cluster that ended with this
        attempt and was Queued once more while the last members stopped.
        """
        entry = self.clusters.get(cluster_id)
        if entry is None:
            return
        if ending is Ending.FINAL and entry.info.status is not ClusterStatus.QUEUED:
            self.forget(cluster_id)
            return
        entry.attempt_id = None
        if ending is Ending.PREPARE_FAILED:
            entry.not_before = now + AFTER_FAILED_PREPARE_SECS
            entry.last_failure = reason
        if entry.is_complete and entry.ready_since is None:
            entry.ready_since = now
        self._note(entry)

    def forget(self, cluster_id: str) -> None:
        """The cluster has ended."""
        entry = self.clusters.pop(cluster_id, None)
        self._ready.pop(cluster_id, None)
        arrived: Sequence[str] = (
            list(self._early.pop(cluster_id, {})) if entry is None else list(entry.arrived)
        )
        for job_key in arrived:
            self._cluster_of.pop(job_key, None)

    def _note(self, entry: Entry) -> None:
        """Keeps the list of those that only want seats in step."""
        if entry.is_complete and entry.attempt_id is None:
            self._ready[entry.info.id] = entry
        else:
            self._ready.pop(entry.info.id, None)


def _turn(entry: Entry) -> tuple[bool, float, str]:
    return not entry.info.prioritized, entry.info.created_at, entry.info.id
