"""Text that no database takes is refused in one line, wherever in a request it stands."""

import json
import re
from collections.abc import Iterator

import pytest
from gradient_server.web.bodies import RequestBody

from tests.integration.web.conftest import Json, Site

PLACES = ["/evaluations/{}", "/jobs/{}/why", "/clusters/{}", "/projects/{}/tasks", "/evaluations?project={}"]


@pytest.mark.parametrize("place", PLACES)
async def test_nul_in_an_address(site: Site, place: str) -> None:
    answer = await site.client.get(place.format("a%00b"))
    assert answer.status_code == 422
    assert answer.json() == {"error": "the address holds a NUL character (%00): leave it out"}
    spelt_out = await site.client.get(place.format("a%2500b"))
    assert spelt_out.status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/workers", {"name": "a", "project": "\0"}, "project"),
        ("/keys", {"name": "a", "project": "x\0"}, "project"),
        ("/workers/a/drain", {"reason": "\0"}, "reason"),
        ("/evaluations", {"source": {"type": "Path", "path": "\0"}}, "path"),
        ("/evaluations", {"source": {"type": "Git", "url": "https://a/\0"}}, "url"),
        (
            "/evaluations",
            {"source": {"type": "Path", "path": "a" * 32 + "-source"}, "attrs": ["b", "\0"]},
            "attrs",
        ),
        ("/clusters", {"name": "\0", "members": []}, "name"),
        ("/clusters", {"name": "a", "members": [{"job": "b", "role": "\0"}]}, "role"),
    ],
)
async def test_nul_in_a_body(site: Site, path: str, body: Json, key: str) -> None:
    answer = await site.client.post(path, json=body)
    assert answer.status_code == 422
    assert f"'{key}' holds a NUL character: leave it out" in answer.json()["error"]


async def test_half_a_surrogate_pair_is_no_text(site: Site) -> None:
    headers = {"Content-Type": "application/json"}
    for content in (
        b'{"name": "\\ud800"}',
        b'{"name": "a", "project": "\\udc00"}',
        b'{"name": "a", "\\udc00": "\\udc00"}',
        b'{"name": "\xed\xa0\x80"}',
    ):
        answer = await site.client.post("/keys", content=content, headers=headers)
        assert answer.status_code in (400, 422)
        assert "\n" not in answer.json()["error"]


def request_bodies(kind: type[RequestBody] = RequestBody) -> Iterator[str]:
    for each in kind.__subclasses__():
        yield each.__name__
        yield from request_bodies(each)


async def test_every_body_is_checked(site: Site) -> None:
    description = site.app.openapi()
    schemas = description["components"]["schemas"]
    asked = [
        operation["requestBody"]["content"].get("application/json", {})
        for operations in description["paths"].values()
        for operation in operations.values()
        if "requestBody" in operation
    ]
    named: set[str] = set()
    waiting = [json.dumps(each) for each in asked]
    while waiting:
        for name in set(re.findall(r'"#/components/schemas/([^"]+)"', waiting.pop())) - named:
            named.add(name)
            waiting.append(json.dumps(schemas[name]))
    assert {"NewEvaluation", "GitSourceRequest", "NewMember", "TaskBody"} <= named
    assert named <= set(request_bodies())
