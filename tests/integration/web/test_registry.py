import hashlib

import pytest
from gradient_server.db.queries.registry import find_worker, registrations

from tests.integration.web.conftest import Site


async def test_projects_are_made_once_and_listed(site: Site) -> None:
    made = await site.client.post("/projects", json={"name": "new"})
    assert made.status_code == 201
    listed = (await site.reader.get("/projects")).json()["projects"]
    assert made.json()["project"] in listed
    assert [one["name"] for one in listed] == ["default", "mine", "new"]
    again = await site.client.post("/projects", json={"name": "new"})
    assert (again.status_code, again.json()) == (409, {"error": "there is a project 'new' already"})


async def test_a_name_that_cannot_be_is_one_line(site: Site) -> None:
    for name in ("-x", "", "a b", "x" * 64, "a/b", "é", "x\n"):
        answer = await site.client.post("/projects", json={"name": name})
        assert answer.status_code == 422, name
        wanted = {"error": "name: use at most 63 letters, digits, '.', '_', '-', no sign first"}
        assert answer.json() == wanted, name


async def test_a_new_key_works_for_its_project(site: Site) -> None:
    made = (await site.client.post("/keys", json={"name": "ci", "project": "mine"})).json()
    bearer = {"Authorization": f"Bearer {made['key']}"}
    listed = await site.reader.get("/projects", headers=bearer)
    assert [one["name"] for one in listed.json()["projects"]] == ["mine"]
    unknown = await site.client.post("/keys", json={"name": "ci", "project": "nobody"})
    assert unknown.status_code == 404
    assert "gradient project list" in unknown.json()["error"]


async def test_a_tasks_limit_holds_evaluations_back_and_lets_them_in(site: Site) -> None:
    async def waiting() -> int:
        return int((await site.reader.get("/status")).json()["queue"]["Eval"])

    body = {"project": "mine", "task": "nightly", "source": {"type": "Git", "url": "https://example.org/x"}}
    for _ in range(3):
        assert (await site.client.post("/evaluations", json={**body, "attrs": []})).status_code == 201
    assert await waiting() == 3
    limited = await site.client.put(
        "/projects/mine/tasks/nightly", json={"max_concurrent_evaluations": 1, "evaluation_timeout_secs": 60}
    )
    assert limited.json() == {
        "name": "nightly",
        "max_concurrent_evaluations": 1,
        "evaluation_timeout_secs": 60.0,
    }
    assert await waiting() == 1
    assert (await site.reader.get("/projects/mine/tasks")).json()["tasks"] == [limited.json()]
    assert (await site.client.put("/projects/mine/tasks/nightly", json={})).status_code == 200
    assert await waiting() == 3
    wrong = await site.client.put("/projects/mine/tasks/nightly", json={"max_concurrent_evaluations": 0})
    assert wrong.status_code == 422


async def test_the_peers_line_carries_the_token_that_was_registered(site: Site) -> None:
    worker_id = "01a2358b-35e3-7f18-9fd2-d9984cd179fa"
    made = await site.client.post(
        "/workers", json={"name": "host", "worker_id": worker_id, "project": "mine"}
    )
    assert made.json()["worker_id"] == worker_id
    peer, _, token = made.json()["peers_line"].partition(":")
    assert peer == made.json()["peer_id"]
    assert made.json()["renewed"] is False
    stored = await site.services.database.read(lambda connection: registrations(connection, worker_id))
    assert stored == {peer: hashlib.sha256(token.encode()).digest()}
    elsewhere = await site.client.post("/workers", json={"name": "host"})
    assert elsewhere.json()["renewed"] is False, "the token of the project is as good as before"
    again = await site.client.post("/workers", json={"name": "host", "project": "mine"})
    assert again.json()["renewed"] is True
    await site.client.post("/workers/host/revoke", json={"project": "mine"})
    anew = await site.client.post("/workers", json={"name": "host", "project": "mine"})
    assert anew.json()["renewed"] is False, "there was nothing left to be void"
    taken = await site.client.post("/workers", json={"name": "host", "worker_id": worker_id[:-1] + "0"})
    assert taken.status_code == 409
    assert (await site.client.post("/workers", json={"name": "x", "worker_id": "../etc"})).status_code == 422


async def test_a_drain_is_stored_shown_replaced_and_undone(site: Site) -> None:
    registered = await site.pool.register("host")
    drained = await site.client.post("/workers/host/drain", json={"reason": "disk", "deadline_secs": 60})
    now = site.services.clock.now()
    assert drained.json()["deadline"] == pytest.approx(now + 60, abs=5)
    (worker,) = (await site.reader.get("/workers")).json()["workers"]
    assert (worker["state"], worker["draining_reason"]) == ("disconnected", "disk")
    row = await site.services.database.read(lambda connection: find_worker(connection, registered.worker_id))
    assert row is not None
    assert row.drain is not None
    undone = await site.client.post("/workers/host/drain", json={"undo": True})
    assert undone.json() == {"name": "host", "draining_reason": None, "deadline": None}
    assert (await site.reader.get("/workers")).json()["workers"][0]["draining_reason"] is None
    assert (await site.client.post("/workers/host/drain", json={"deadline_secs": -1})).status_code == 422


async def test_a_revoked_worker_is_not_listed_and_cannot_be_revoked_again(site: Site) -> None:
    registered = await site.pool.register("host")
    revoked = await site.client.post("/workers/host/revoke")
    assert revoked.json() == {"worker_id": registered.worker_id, "peers": ["server"]}
    assert (await site.reader.get("/workers")).json() == {"workers": []}
    assert (await site.client.post("/workers/host/revoke")).status_code == 409


@pytest.mark.parametrize("action", ["drain", "revoke"])
async def test_an_unknown_worker_says_how_to_list_them(site: Site, action: str) -> None:
    answer = await site.client.post(f"/workers/nobody/{action}", json={})
    assert answer.status_code == 404
    assert answer.json() == {
        "error": "there is no worker 'nobody': gradient worker list names those there are"
    }
