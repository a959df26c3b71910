"""BuildOutput: what a build made, before its uploads (protocol.md, Build steps)."""

from collections.abc import Mapping

from gradient_protocol.messages.shapes import BuildOutput

from gradient_server.graph import sql
from gradient_server.graph.assignments import Assignment
from gradient_server.graph.content import check_built_output, check_product
from gradient_server.graph.metrics import store_build_metrics
from gradient_server.graph.work import Work

__all__ = ["check_build_output", "check_output", "store_build_output", "store_checked_output"]

_EXPECTED = sql.statement(
    "SELECT o.name, o.path, o.derivation FROM derivation_output o JOIN derivation_build b"
    " ON b.derivation = o.derivation WHERE b.id = :build"
)
_SET_OUTPUT = sql.statement(
    "UPDATE derivation_output SET nar_hash = :nar_hash, nar_size = :nar_size,"
    " contains_store_dir = :contains_store_dir WHERE derivation = :derivation AND name = :name"
)
_SET_BUILD = sql.statement(
    "UPDATE derivation_build SET substituted = :substituted, products = :products WHERE id = :build",
    "UPDATE derivation_build SET substituted = CAST(:substituted AS BOOLEAN), products ="
    " CAST(:products AS JSON)"
    " WHERE id = :build",
)


def check_build_output(work: Work, assignment: Assignment, report: BuildOutput) -> str | None:
    """Why the content is refused, None if it fits the build."""
    return check_output(report, {name: path for name, (path, _) in _expected(work, assignment).items()})


def store_build_output(work: Work, assignment: Assignment, report: BuildOutput) -> str | None:
    """Stores hashes, sizes, products and metrics. The reason if the content is refused."""
    expected = _expected(work, assignment)
    reason = check_output(report, {name: path for name, (path, _) in expected.items()})
    if reason is None:
        derivation = next((derivation for _, derivation in expected.values()), 0)
        store_checked_output(work, assignment, report, derivation)
    return reason


def store_checked_output(work: Work, assignment: Assignment, report: BuildOutput, derivation: int) -> None:
    """The same of a report that `check_output` found to fit the build of this derivation."""
    rows = [
        {
            "derivation": derivation,
            "name": output.name,
            "nar_hash": output.nar_hash,
            "nar_size": output.nar_size,
            "contains_store_dir": output.contains_store_dir,
        }
        for output in report.outputs
    ]
    sql.run_many(work.connection, _SET_OUTPUT, rows)
    if report.substituted or report.products:
        _set_build(work, assignment, report)
    if report.metrics is not None and not report.substituted:
        total = sum(output.nar_size for output in report.outputs)
        store_build_metrics(work, assignment, report.metrics, total)


def _expected(work: Work, assignment: Assignment) -> dict[str, tuple[str, int]]:
    rows = sql.run(work.connection, _EXPECTED, {"build": assignment.job})
    return {row[0]: (row[1], row[2]) for row in rows}


def check_output(report: BuildOutput, expected: Mapping[str, str]) -> str | None:
    """Why the content is refused, None if it fits a build with these outputs (paths by name). Pure."""
    for output in report.outputs:
        if expected.get(output.name) != output.path:
            return f"the build has no output {output.name[:100]!r} at {output.path[:300]!r}"
        reason = check_built_output(output)
        if reason is not None:
            return reason
    if len({output.name for output in report.outputs}) != len(expected):
        return "not every output of the build is named, or one is named twice"
    for product in report.products:
        reason = check_product(product, set(expected))
        if reason is not None:
            return reason
    return None


def _set_build(work: Work, assignment: Assignment, report: BuildOutput) -> None:
    products = [
        {
            "output": product.output,
            "path": product.path,
            "type": product.type,
            "name": product.name,
            "size": product.size,
        }
        for product in report.products
    ]
    parameters = {
        "build": assignment.job,
        "substituted": report.substituted,
        "products": sql.to_json(products) if products else None,
    }
    sql.run(work.connection, _SET_BUILD, parameters)
