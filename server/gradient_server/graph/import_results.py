"""The answers to import requests: ready once every path is built, failed where one finally failed."""

from collections.abc import Iterable, Sequence

from gradient_server.domain.events import ImportSettled
from gradient_server.graph import sql
from gradient_server.graph.work import Work

__all__ = ["READY", "answer_settled", "settle_imports"]

READY = "ready"

_SETTLE = sql.statement(
    "UPDATE import_request SET result = :result WHERE build IN [ids] AND result IS NULL RETURNING query"
)
_ANSWERS = sql.statement(
    "SELECT r.query, r.assignment, a.worker, r.path, r.result FROM import_request r"
    " JOIN dispatched_job a ON a.id = r.assignment"
    " WHERE r.query IN [queries] AND NOT EXISTS"
    " (SELECT 1 FROM import_request o WHERE o.query = r.query AND o.result IS NULL) ORDER BY r.query, r.path"
)
_FORGET = sql.statement("DELETE FROM import_request WHERE query IN [queries]")


def settle_imports(work: Work, builds: Sequence[str], error: str | None) -> None:
    """These builds are Completed (`error` None) or ended otherwise: answers whoever waits for them."""
    parameters = {"ids": sql.array(work.connection, builds), "result": READY if error is None else error}
    queries = {row[0]: None for row in sql.run(work.connection, _SETTLE, parameters)}
    answer_settled(work, queries)


def answer_settled(work: Work, queries: Iterable[str]) -> None:
    """Answers those of `queries` whose every path has a result, and forgets them."""
    wanted = list(queries)
    if not wanted:
        return
    answers: dict[str, list[tuple[str, str, str, str]]] = {}
    parameters = {"queries": sql.array(work.connection, wanted)}
    for query, *rest in sql.run(work.connection, _ANSWERS, parameters):
        assignment, worker, path, result = rest
        answers.setdefault(query, []).append((assignment, worker, path, result))
    for query, rows in answers.items():
        assignment, worker = rows[0][:2]
        ready = tuple(path for _, _, path, result in rows if result == READY)
        failed = tuple((path, result) for _, _, path, result in rows if result != READY)
        work.events.append(ImportSettled(query, assignment, worker, ready, failed))
    if answers:
        sql.run(work.connection, _FORGET, {"queries": sql.array(work.connection, list(answers))})
        work.imports_over = True
