"""A job as the scheduler sees it, and the keys that name jobs."""

from dataclasses import dataclass

from gradient_protocol.kinds import EvalStep, JobKind
from gradient_protocol.messages.server import RequiredPath

__all__ = ["PendingJob", "build_key", "eval_key", "split_job_key"]


def build_key(build_id: str) -> str:
    """The job key of a shared build (cluster-jobs.md, Claim); it is the wire's `job_id` too."""
    return f"build:{build_id}"


def eval_key(evaluation_id: str) -> str:
    """The job key of an evaluation."""
    return f"eval:{evaluation_id}"


def split_job_key(job_key: str) -> tuple[JobKind, str]:
    """The kind and the id that a job key names. ValueError for anything else."""
    prefix, separator, job = job_key.partition(":")
    if separator and job and prefix == "build":
        return JobKind.BUILD, job
    if separator and job and prefix == "eval":
        return JobKind.EVAL, job
    raise ValueError(f"{job_key!r} is not a job: write eval:ID or build:ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingJob:
    """A job that could start now: what eligibility, offers and scoring read. Owned values only.

    `projects` are those that want it: a worker must serve one of them. Sizes in bytes, times in
    seconds since the epoch, None is unknown.
    """

    job_id: str
    kind: JobKind
    name: str
    projects: tuple[str, ...]
    system: str
    features: frozenset[str]
    queued_at: float
    ready_at: float
    prioritized: bool
    build_request: bool
    # Not to be assigned before this wall time: backoff after a transient failure.
    not_before: float | None = None
    # Builds.
    pname: str | None = None
    drv_path: str | None = None
    required_paths: tuple[RequiredPath, ...] = ()
    output_paths: tuple[str, ...] = ()
    dependency_count: int | None = None
    closure_size: int | None = None
    output_size: int | None = None
    ifd: bool = False
    is_fixed_output: bool = False
    prefer_local_build: bool = False
    substitute_outputs: int | None = None
    # The largest peak of this very build so far (policies.md, History).
    peak_ram_mb: int | None = None
    # After an out-of-memory kill: only workers with more RAM than this, while one is known.
    needs_ram_over_mb: int | None = None
    # Evaluations.
    task: str | None = None
    steps: tuple[EvalStep, ...] = ()
    # Members wait for their cluster (cluster-jobs.md, Tracking).
    cluster: str | None = None
