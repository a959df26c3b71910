"""Losses, for both kinds of job."""

from gradient_protocol.kinds import JobKind

from gradient_server.graph.assignments import Assignment
from gradient_server.graph.build_endings import build_lost, find_build
from gradient_server.graph.evaluation_endings import evaluation_lost, find_evaluation
from gradient_server.graph.work import Work

__all__ = ["lose"]


def lose(work: Work, assignment: Assignment, error: str, peak_ram_mb: int | None = None) -> None:
    """Closes an open assignment as abandoned; its job goes on as protocol.md, Lost connections, says.

    `peak_ram_mb`: the memory that a build was last seen with, None for never.
    The caller holds the graph's lock, and has made sure that it is no member of an open attempt.
    """
    if assignment.kind is JobKind.BUILD:
        build_lost(work, assignment, find_build(work, assignment.job), error, peak_ram_mb)
    else:
        evaluation_lost(work, assignment, find_evaluation(work, assignment.job), error)
