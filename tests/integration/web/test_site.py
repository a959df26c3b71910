import json
import re
from collections.abc import AsyncIterator

import httpx2
import pytest
import sqlalchemy as sa
import trio
from gradient_server.db.migrate import newest_revision
from gradient_server.db.tables import evaluation as evaluation_table
from gradient_server.web.limits import MAX_BODY_BYTES
from gradient_server.web.meters import STALE_SECS
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.web.conftest import Site


@pytest.fixture
async def root(site: Site) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=site.url, trust_env=False, verify=False, timeout=20.0) as client:
        yield client


async def revision(site: Site, statement: str) -> None:
    await site.services.database.run(lambda connection: connection.execute(sa.text(statement)))


async def test_ready_while_it_can_work(site: Site, root: httpx2.AsyncClient) -> None:
    await revision(site, "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
    await revision(site, f"INSERT INTO alembic_version VALUES ('{newest_revision()}')")
    assert (await root.get("/readyz")).json() == {"status": "ok"}
    site.web.meters._beat_at = trio.current_time() - STALE_SECS
    stuck = await root.get("/readyz")
    assert stuck.status_code == 503
    site.web.meters._beat_at = trio.current_time()
    await revision(site, "UPDATE alembic_version SET version_num = 'older'")
    migrated = await root.get("/readyz")
    assert (migrated.status_code, "gradient-server migrate" in migrated.json()["status"]) == (503, True)
    assert (await root.get("/healthz")).status_code == 200


async def test_metrics_can_be_parsed_and_count_what_is_there(site: Site, root: httpx2.AsyncClient) -> None:
    await site.pool.submit()
    await site.reader.get("/status")
    await root.get("/no/such/place")
    answer = await root.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert all(name[0].startswith("gradient_") for name in found)
    assert found["gradient_pending_jobs", "Eval"] == 1
    assert found["gradient_evaluations", "Queued"] == 1
    assert found["gradient_sessions",] == 0
    assert found["gradient_http_request_seconds_count", "/api/v1/status", "200", "GET"] == 1
    assert not any("/no/such/place" in name for name in found)


async def test_the_board_shows_everything_as_text(site: Site, root: httpx2.AsyncClient) -> None:
    evaluation = await site.pool.submit()
    await site.client.post(f"/evaluations/{evaluation}/abort")
    evil = "<script>alert(1)</script>\"'&"
    row = evaluation_table.update().where(evaluation_table.c.id == evaluation).values(error=evil)
    await site.services.database.run(lambda connection: connection.execute(row))
    await site.client.post("/workers", json={"name": "host"})
    await site.client.post("/workers/host/drain", json={"reason": evil})
    answer = await root.get("/board")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "<script" not in answer.text
    assert answer.text.count("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;") == 2
    assert evaluation in answer.text


async def test_the_rules_of_the_default_policy_are_explained(site: Site, root: httpx2.AsyncClient) -> None:
    rules = (await root.get("/board/scoring/rules")).json()["rules"]
    assert {"WaitTimeRule", "EstimatedTimeRule", "FairShareRule"} <= {rule["name"] for rule in rules}
    assert all(rule["description"] for rule in rules)
    page = await root.get("/board/scoring/rules", headers={"Accept": "text/html"})
    assert "WaitTimeRule" in page.text
    assert page.headers["content-type"].startswith("text/html")


async def test_the_description_of_the_api_is_whole(site: Site, root: httpx2.AsyncClient) -> None:
    description = (await root.get("/openapi.json")).json()
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(description)))
    assert named == set(description["components"]["schemas"]) - {"HTTPValidationError", "ValidationError"}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            good = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
            assert good, (method, path)
            assert all(answer.get("content") for answer in good), (method, path)
            if path.startswith("/api/v1"):
                assert operation["security"], (method, path)


async def test_bodies_are_bounded(site: Site) -> None:
    body = b'{"name": "' + b"x" * MAX_BODY_BYTES + b'"}'
    answer = await site.client.post("/projects", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert set(answer.json()) == {"error"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"nonsense", b"\xff"])
async def test_a_body_that_cannot_be_read_is_one_line(site: Site, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = await site.client.post("/projects", content=content, headers=headers)
    assert answer.status_code in (400, 422)
    assert set(answer.json()) == {"error"}
    assert "\n" not in answer.json()["error"]


async def test_what_is_not_there_and_what_is_not_for_it(site: Site, root: httpx2.AsyncClient) -> None:
    assert "/openapi.json" in (await root.get("/nothing")).json()["error"]
    wrong = await site.client.delete("/projects")
    assert (wrong.status_code, "/openapi.json" in wrong.json()["error"]) == (405, True)


async def test_a_bug_is_one_line_for_the_client_and_a_traceback_for_the_log(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(site.services.scheduler, "snapshot", broken)
    answer = await site.reader.get("/status")
    assert answer.status_code == 500
    assert answer.json() == {"error": "internal error; the server's log has it"}
