"""The one place that turns what went wrong in a job into a failure kind (protocol.md, "Failure kinds").

Exit status other than 0, a signal, a missing output: Permanent. Time or silence over: Timeout. The
cgroup counted an out-of-memory kill: OutOfMemory. Inputs that the server does not have:
InputsUnavailable. Anything of the worker's own making, and what befell the whole host: Transient.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradient_protocol.errors import SessionClosed
from gradient_protocol.kinds import FailureKind
from gradient_protocol.limits import MAX_ERROR_TEXT
from gradient_protocol.messages.shapes import Metrics
from gradient_protocol.text import legible

from gradient_worker.runner.layout import ExitReason
from gradient_worker.runner.values import BuildExit, RunnerGone

__all__ = [
    "Failure",
    "failure",
    "inputs_unavailable",
    "lost_outputs",
    "missing_outputs",
    "of_exception",
    "of_exit",
    "with_metrics",
]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed. `error` is for people, within the 64 KiB of the wire."""

    kind: FailureKind
    error: str
    missing_paths: tuple[str, ...] = ()
    metrics: Metrics | None = None


def failure(kind: FailureKind, error: str) -> Failure:
    """A failure whose text is cut to what the wire takes."""
    cut = legible(error).encode()[:MAX_ERROR_TEXT].decode(errors="ignore")
    return Failure(kind, cut)


def of_exit(
    ended: BuildExit, *, timeout_secs: float, max_silent_secs: float, host_failure: bool
) -> Failure | None:
    """How a command ended; None where it succeeded.

    `host_failure`: all builds of this worker ended by signal together, or the kernel killed beyond the
    build's own cgroup.
    """
    match ended.reason:
        case ExitReason.TIMEOUT:
            return failure(FailureKind.TIMEOUT, f"ran longer than {timeout_secs:g} s")
        case ExitReason.SILENT:
            return failure(FailureKind.TIMEOUT, f"wrote nothing for {max_silent_secs:g} s")
        case ExitReason.KILLED:
            return failure(FailureKind.TRANSIENT, "the build was killed on this worker")
        case ExitReason.RUNNER_ERROR:
            return failure(FailureKind.TRANSIENT, f"the build could not be started: {ended.message}")
        case ExitReason.RUNNER_DIED:
            return failure(FailureKind.TRANSIENT, "the process that ran the build died")
    if ended.code == 0:
        return None  # whatever was killed in it, the command knew to do without
    if host_failure or ended.host_killed:
        return failure(FailureKind.TRANSIENT, "the host killed this build together with others")
    if ended.oom_killed:
        return failure(FailureKind.OUT_OF_MEMORY, "the kernel killed a process of the build: out of memory")
    if ended.signal is not None:
        return failure(FailureKind.PERMANENT, f"the command was ended by {_signal_name(ended.signal)}")
    return failure(FailureKind.PERMANENT, f"the command ended with exit status {ended.code}")


def missing_outputs(names: Sequence[str]) -> Failure:
    """The command succeeded without making these outputs."""
    variables = ", ".join(f"${name}" for name in names)
    plural = "s" if len(names) > 1 else ""
    return failure(FailureKind.PERMANENT, f"the command did not make its output{plural} {variables}")


def lost_outputs(names: Sequence[str]) -> Failure:
    """The command succeeded under an earlier agent, and these outputs are nowhere now."""
    variables = ", ".join(f"${name}" for name in names)
    reason = f"{variables} did not outlive the agent that was storing it, or was never made"
    return failure(FailureKind.TRANSIENT, reason)


def inputs_unavailable(paths: Sequence[str], reason: str) -> Failure:
    """The server does not have these inputs, or has them damaged."""
    text = f"{len(paths)} input{'s' if len(paths) > 1 else ''} not available: {paths[0]}: {reason}"
    cut = failure(FailureKind.INPUTS_UNAVAILABLE, text)
    return Failure(cut.kind, cut.error, missing_paths=tuple(paths))


def with_metrics(failed: Failure, metrics: Metrics | None) -> Failure:
    """A build that failed has used what it has used."""
    return replace(failed, metrics=metrics)


def of_exception(error: BaseException) -> Failure:
    """Something of the worker's own making."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, RunnerGone):
        return failure(FailureKind.TRANSIENT, "the process that ran the build died")
    if isinstance(error, SessionClosed):
        return failure(FailureKind.TRANSIENT, f"the session ended: {error.reason}")
    if isinstance(error, OSError):
        return failure(
            FailureKind.TRANSIENT, f"the worker failed: {error.strerror or error}: {error.filename}"
        )
    return failure(FailureKind.TRANSIENT, f"the worker failed: {type(error).__name__}: {error}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
