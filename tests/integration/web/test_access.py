import httpx2
from gradient_server.db.queries.registry import list_api_keys, revoke_api_key

from tests.integration.web.conftest import Site

NEEDED = "an API key is needed: set GRADIENT_API_KEY_FILE to the file the server printed at its start"
WRITING = [
    ("POST", "/projects", {"name": "p"}),
    ("POST", "/keys", {"name": "k"}),
    ("POST", "/workers", {"name": "w"}),
    ("POST", "/workers/w/drain", {"reason": "r"}),
    ("POST", "/workers/w/revoke", {}),
    ("POST", "/evaluations", {"source": {"type": "Git", "url": "https://example.invalid"}}),
    ("POST", "/evaluations/some-evaluation/abort", {}),
    ("POST", "/jobs/some-build/abort", {}),
    ("PUT", f"/sources?project=default&nar_size=1&nar_hash=sha256:{'0' * 64}", None),
]
OF_THE_SERVER = [
    ("POST", "/projects", {"name": "p"}),
    ("POST", "/keys", {"name": "k"}),
    ("POST", "/workers", {"name": "w"}),
    ("POST", "/workers/w/drain", {"reason": "r"}),
]


async def test_writing_needs_a_key_even_here(site: Site) -> None:
    for method, path, body in WRITING:
        answer = await site.reader.request(method, path, json=body)
        assert answer.status_code == 401, path
        assert answer.json() == {"error": NEEDED}
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_key_of_a_project_does_not_change_the_server(site: Site) -> None:
    for method, path, body in OF_THE_SERVER:
        assert (await site.bound.request(method, path, json=body)).status_code == 403, path


async def test_a_wrong_key_is_refused_where_none_is_needed(site: Site) -> None:
    answer = await site.reader.get("/projects", headers={"Authorization": "Bearer wrong"})
    assert answer.status_code == 401


async def test_a_revoked_key_is_good_no_more(site: Site) -> None:
    assert (await site.client.post("/projects", json={"name": "p"})).status_code == 201
    keys = await site.services.database.read(list_api_keys)
    for key in keys:
        await site.services.database.run(
            lambda connection, key=key: revoke_api_key(connection, key.id, now=1.0)
        )
    assert (await site.client.post("/projects", json={"name": "q"})).status_code == 401


async def test_reading_through_a_proxy_needs_a_key(site: Site) -> None:
    passed_on = {"X-Forwarded-For": "192.0.2.1"}
    for path in ("/projects", "/workers", "/evaluations", "/status", "/jobs/build:12345678"):
        assert (await site.reader.get(path, headers=passed_on)).status_code == 401
    async with httpx2.AsyncClient(base_url=site.url, headers=passed_on, trust_env=False) as elsewhere:
        assert (await elsewhere.get("/metrics")).status_code == 401
        assert (await elsewhere.get("/board")).status_code == 401
        assert (await elsewhere.get("/healthz")).status_code == 200
    assert (await site.client.get("/projects", headers=passed_on)).status_code == 200


async def test_a_key_of_a_project_sees_that_project_alone(site: Site) -> None:
    theirs = await site.pool.submit("default")
    mine = await site.pool.submit("mine")
    listed = (await site.bound.get("/evaluations")).json()["evaluations"]
    assert [one["id"] for one in listed] == [mine]
    assert [one["name"] for one in (await site.bound.get("/projects")).json()["projects"]] == ["mine"]
    status = (await site.bound.get("/status")).json()
    assert status["queue"] == {"Build": 0, "Eval": 1}
    assert status["evaluations"] == {"Queued": 1}
    for path in (f"/evaluations/{theirs}", f"/evaluations/{theirs}/events", f"/jobs/eval:{theirs}/why"):
        assert (await site.bound.get(path)).status_code == 404
    assert (await site.bound.get("/evaluations", params={"project": "default"})).status_code == 403
    assert (await site.bound.post(f"/evaluations/{theirs}/abort")).status_code == 404
    assert (await site.bound.post(f"/jobs/eval:{theirs}/abort")).status_code == 404
    assert (await site.bound.get(f"/evaluations/{mine}")).status_code == 200
    assert (await site.bound.post(f"/evaluations/{mine}/abort")).json() == {
        "evaluation": mine,
        "aborted": True,
    }
    source = {"type": "Git", "url": "https://example.invalid/tree"}
    assert (await site.bound.post("/evaluations", json={"source": source})).status_code == 403
    assert (
        await site.bound.post("/evaluations", json={"source": source, "project": "mine"})
    ).status_code == 201


async def test_a_key_of_a_project_registers_and_revokes_for_it_alone(site: Site) -> None:
    registered = await site.client.post("/workers", json={"name": "shared"})
    answer = await site.bound.post("/workers", json={"name": "shared", "project": "mine"})
    assert answer.json()["worker_id"] == registered.json()["worker_id"]
    assert (await site.bound.post("/workers", json={"name": "own", "project": "default"})).status_code == 403
    revoked = await site.bound.post("/workers/shared/revoke", json={})
    assert revoked.json()["peers"] == [answer.json()["peer_id"]]
    (worker,) = (await site.client.get("/workers")).json()["workers"]
    assert worker["projects"] is None, "its registration with the server stands"
