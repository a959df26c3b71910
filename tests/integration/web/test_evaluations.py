import pytest
from gradient_server.db.queries.cached_paths import CachedPath, put_path
from gradient_server.domain.status import BuildStatus, EvaluationStatus
from gradient_server.web.evaluation_views import EvaluationAnswer

from tests.fixtures.graph import make_build, make_evaluation, store_path, want
from tests.integration.web.conftest import Site

GIT = {"type": "Git", "url": "https://example.invalid/tree"}


async def test_what_is_submitted_is_queued_and_shown(site: Site) -> None:
    body = {"project": "mine", "task": "nightly", "source": GIT, "attrs": ["a"], "prioritized": True}
    submitted = await site.client.post("/evaluations", json=body)
    assert submitted.status_code == 201
    evaluation = submitted.json()["evaluation"]
    shown = (await site.reader.get(f"/evaluations/{evaluation}")).json()
    assert shown["id"] == evaluation
    assert (shown["project"], shown["task"], shown["status"]) == ("mine", "nightly", "Queued")
    assert (shown["attrs"], shown["prioritized"], shown["builds"]) == (["a"], True, [])
    assert (await site.reader.get("/status")).json()["queue"] == {"Build": 0, "Eval": 1}
    listed = (await site.reader.get("/evaluations")).json()["evaluations"]
    assert [one["id"] for one in listed] == [evaluation]
    assert "builds" not in listed[0]


async def test_a_source_that_is_not_held_is_refused(site: Site) -> None:
    path = "0" * 32 + "-source"
    body = {"source": {"type": "Path", "path": path}}
    refused = await site.client.post("/evaluations", json=body)
    assert refused.status_code == 409
    assert path in refused.json()["error"]
    entry = CachedPath(
        path=path, nar_hash="", nar_size=1, file_size=1, compression="zstd", object="o", references=()
    )
    await site.services.database.run(lambda connection: put_path(connection, entry, now=1.0))
    accepted = await site.client.post("/evaluations", json=body)
    shown = await site.reader.get(f"/evaluations/{accepted.json()['evaluation']}")
    assert shown.json()["source_path"] == path


@pytest.mark.parametrize(
    "source",
    [
        {"type": "Git", "url": "ext::sh -c id"},
        {"type": "Git", "url": "--upload-pack=id"},
        {"type": "Git", "url": "https://example.invalid", "rev": "--output=x"},
        {"type": "Path", "path": "../../etc"},
        {"type": "Tar", "url": "x"},
        {},
    ],
)
async def test_a_source_that_cannot_be_is_one_line_and_stores_nothing(site: Site, source: object) -> None:
    answer = await site.client.post("/evaluations", json={"source": source})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("source")
    assert "\n" not in answer.json()["error"]
    assert (await site.reader.get("/evaluations")).json() == {"evaluations": []}


async def test_counts_builds_and_outputs_of_an_evaluation(site: Site) -> None:
    def graph(connection: object) -> str:
        evaluation = make_evaluation(connection, status=EvaluationStatus.BUILDING)
        want(connection, evaluation, make_build(connection, status=BuildStatus.COMPLETED), attr="top")
        want(connection, evaluation, make_build(connection, status=BuildStatus.CREATED))
        want(connection, evaluation, make_build(connection, status=BuildStatus.FAILED), attr="broken")
        return evaluation

    evaluation = await site.services.database.run(graph)
    shown = (await site.reader.get(f"/evaluations/{evaluation}")).json()
    assert EvaluationAnswer.model_validate(shown, strict=True).model_dump() == shown, "as it is described"
    assert shown["counts"] == {"Completed": 1, "Created": 1, "Failed": 1}
    assert [(one["attr"], one["status"], one["stage"]) for one in shown["builds"]] == [
        ("top", "Completed", None),
        (None, "Created", None),
        ("broken", "Failed", None),
    ]
    assert {"id", "name", "created_at", "worker", "error"} <= set(shown["builds"][0])
    (output,) = shown["outputs"]  # what failed has none
    assert output["path"] == store_path(output["name"])
    assert (output["attr"], output["nar_size"], output["contains_store_dir"]) == ("top", None, False)


async def test_ids_may_be_shortened_while_they_are_plain(site: Site) -> None:
    first, second = await site.pool.submit(), await site.pool.submit()
    assert (await site.reader.get(f"/evaluations/{first[:-1]}")).json()["id"] == first
    ambiguous = await site.reader.get(f"/evaluations/{first[:6]}")
    assert ambiguous.status_code == 409
    assert first in ambiguous.json()["error"]
    assert second in ambiguous.json()["error"]
    for text in ("01", "ffffffffff", "%25", "'"):
        unknown = await site.reader.get(f"/evaluations/{text}")
        assert unknown.status_code == 404
        assert "GET /api/v1/evaluations" in unknown.json()["error"]


async def test_lists_are_bounded(site: Site) -> None:
    for _ in range(3):
        newest = await site.pool.submit()
    listed = (await site.reader.get("/evaluations", params={"limit": 1})).json()["evaluations"]
    assert [one["id"] for one in listed] == [newest]
    for limit in (0, 501, -1):
        assert (await site.reader.get("/evaluations", params={"limit": limit})).status_code == 422


async def test_an_abort_ends_it_once(site: Site) -> None:
    evaluation = await site.pool.submit()
    assert (await site.client.post(f"/evaluations/{evaluation}/abort")).json()["aborted"]
    assert (await site.reader.get(f"/evaluations/{evaluation}")).json()["status"] == "Aborted"
    assert not (await site.client.post(f"/evaluations/{evaluation}/abort")).json()["aborted"]
