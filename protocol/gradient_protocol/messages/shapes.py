"""Shapes that messages carry (messages.md, "Shapes")."""

from typing import Annotated

import msgspec

from gradient_protocol.kinds import EvalStage, EvalStep, JobStage, PeakSource, SpanKind
from gradient_protocol.limits import MAX_INT

__all__ = [
    "BuildInput",
    "BuildJob",
    "BuildOutput",
    "BuildProduct",
    "BuiltOutput",
    "Capabilities",
    "Cluster",
    "ClusterMember",
    "ClusterSeat",
    "Count",
    "Derivation",
    "DerivationInput",
    "DerivationOutput",
    "EvalJob",
    "EvalResult",
    "EvalStageUpdate",
    "EvalStats",
    "FetchResult",
    "FixedOutput",
    "GitSource",
    "Job",
    "JobUpdateKind",
    "MemberAddress",
    "Metrics",
    "Note",
    "PathSource",
    "RosterEntry",
    "Shape",
    "SignalTarget",
    "Source",
    "Span",
    "Stage",
    "Started",
]


# Every integer of the wire counts something: a size, an offset, a place in an order. None is
# negative, and none is beyond what the databases can store.
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]


class Shape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every map on the wire. An optional field that is None is left out."""


class Capabilities(Shape, frozen=True):
    """What a side can do. `InitAck` carries what both sides have."""

    fetch: bool
    eval: bool
    build: bool
    zstd: bool


class FixedOutput(Shape, frozen=True):
    """A download: where from, and the SHA-256 of the file in hex."""

    url: str
    sha256: str


class DerivationOutput(Shape, frozen=True):
    """An output's name (`out` by default) and its store path."""

    name: str
    path: str


class BuildInput(Shape, frozen=True):
    """One path of the inputs' runtime closure. Direct inputs have a `name` (a source's is `source`)."""

    path: str
    nar_hash: str
    nar_size: Count
    references: list[str]
    name: str | None = None
    output: str | None = None


class BuildJob(Shape, frozen=True, tag="Build"):
    """A build to run. No `command` where there is a `fixed_output`, or where the store is Nix."""

    project: str
    drv_path: str
    name: str
    system: str
    features: list[str]
    command: list[str]
    env: dict[str, str]
    inputs: list[BuildInput]
    outputs: list[DerivationOutput]
    timeout_secs: float
    max_silent_secs: float
    fixed_output: FixedOutput | None = None
    cores: Count | None = None


class PathSource(Shape, frozen=True, tag="Path"):
    """A source tree that the server holds as a store path."""

    path: str


class GitSource(Shape, frozen=True, tag="Git"):
    """A source tree to clone. Without `rev`, the remote's default branch."""

    url: str
    rev: str | None = None


Source = PathSource | GitSource


class EvalJob(Shape, frozen=True, tag="Eval"):
    """An evaluation to run. No `attrs` means everything the source defines."""

    project: str
    task: str
    evaluation: str
    steps: list[EvalStep]
    source: Source
    attrs: list[str]
    timeout_secs: float


Job = BuildJob | EvalJob


class ClusterSeat(Shape, frozen=True):
    """Marks an assignment as a member's: hold it, at most `hold_secs` from its arrival."""

    attempt: str
    role: str
    index: Count
    hold_secs: float


class RosterEntry(Shape, frozen=True):
    """One member of a started attempt and the worker it sits on."""

    role: str
    index: Count
    worker: str
    primary: bool
    endpoint: str | None = None


class MemberAddress(Shape, frozen=True):
    """Names one member: `index` counts from 0 within the role."""

    role: str
    index: Count


class SignalTarget(Shape, frozen=True):
    """Whom a signal is for. Without `index`, every member of the role."""

    role: str
    index: Count | None = None


class Note(Shape, frozen=True):
    """A warning or error of an evaluation, and where it stems from (`file:line: key`)."""

    message: str
    source: str | None = None


class DerivationInput(Shape, frozen=True):
    """An edge of the graph. A `runtime_only` input is needed by the outputs, not by the build."""

    drv_path: str
    outputs: list[str]
    runtime_only: bool
    name: str | None = None


class Derivation(Shape, frozen=True):
    """One node of the graph as an evaluator found it. `attr` marks what was asked for."""

    drv_path: str
    name: str
    system: str
    features: list[str]
    command: list[str]
    env: dict[str, str]
    outputs: list[DerivationOutput]
    inputs: list[DerivationInput]
    sources: list[str]
    prefer_local: bool
    pname: str | None = None
    fixed_output: FixedOutput | None = None
    timeout_secs: float | None = None
    max_silent_secs: float | None = None
    attr: str | None = None


class ClusterMember(Shape, frozen=True):
    """A member of a cluster job: the build it runs, its role, and the worker it is pinned to."""

    drv_path: str
    role: str
    primary: bool
    pin: str | None = None


class Cluster(Shape, frozen=True):
    """A group of builds that start together (cluster-jobs.md)."""

    name: str
    same_zone: bool
    retry_budget: Count
    members: list[ClusterMember]


class Metrics(Shape, frozen=True):
    """What a build used. Anything that could not be measured is absent, never 0."""

    build_time_ms: Count
    oom_killed: bool
    concurrent_builds: Count
    peak_ram_mb: Count | None = None
    anon_peak_ram_mb: Count | None = None
    peak_source: PeakSource | None = None
    cpu_time_ms: Count | None = None
    avg_cpu_pct: float | None = None
    disk_read_bytes: Count | None = None
    disk_write_bytes: Count | None = None
    build_cores: Count | None = None
    cpu_core_score: float | None = None


class Span(Shape, frozen=True):
    """A measured part of a job, in seconds since the epoch on the server's clock."""

    kind: SpanKind
    start: float
    end: float
    parent: Count | None = None
    nar_bytes: Count | None = None
    stored_bytes: Count | None = None
    paths: Count | None = None


class Started(Shape, frozen=True, tag="Started"):
    """A held job began to run."""


class Stage(Shape, frozen=True, tag="Stage"):
    """A build job entered a stage."""

    stage: JobStage


class EvalStageUpdate(Shape, frozen=True, tag="EvalStage"):
    """An evaluation job entered a stage."""

    stage: EvalStage


class FetchResult(Shape, frozen=True, tag="FetchResult"):
    """The source of an evaluation is in the store, under this path. A numbered report."""

    path: str
    nar_hash: str
    nar_size: Count
    rev: str | None = None


class EvalResult(Shape, frozen=True, tag="EvalResult"):
    """A batch of the graph. One that names a cluster holds all its members. A numbered report."""

    derivations: list[Derivation]
    clusters: list[Cluster]
    warnings: list[Note]
    errors: list[Note]


class EvalStats(Shape, frozen=True, tag="EvalStats"):
    """What an evaluation cost. A numbered report."""

    derivations: Count
    known: Count
    wall_ms: Count
    cpu_ms: Count
    peak_rss_mb: Count | None = None


class BuiltOutput(Shape, frozen=True):
    """One output as it was built."""

    name: str
    path: str
    nar_hash: str
    nar_size: Count
    references: list[str]
    contains_store_dir: bool


class BuildProduct(Shape, frozen=True):
    """A file of an output that is worth naming to people."""

    output: str
    path: str
    type: str
    name: str
    size: Count | None = None


class BuildOutput(Shape, frozen=True, tag="BuildOutput"):
    """What a build made. A numbered report. `substituted`: it was there already."""

    outputs: list[BuiltOutput]
    products: list[BuildProduct]
    substituted: bool
    metrics: Metrics | None = None


JobUpdateKind = Started | Stage | EvalStageUpdate | FetchResult | EvalResult | EvalStats | BuildOutput
