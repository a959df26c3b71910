"""docs/http.md names every place that there is, and no other."""

import re
from pathlib import Path

from tests.integration.web.conftest import Site

PAGE = Path(__file__).parents[3] / "docs" / "http.md"
API = "/api/v1"


async def test_the_page_names_every_place(site: Site) -> None:
    there = {
        f"{method.upper()} {path}"
        for path, operations in site.app.openapi()["paths"].items()
        for method in operations
    }
    table = PAGE.read_text().partition("## What there is below")[2].partition("\n## ")[0]
    told = re.findall(r"^\| `([A-Z]+) (/[^`]*)` \|", table, re.MULTILINE)
    assert len(told) == len(set(told))
    assert {f"{method} {API}{path}" for method, path in told} == {
        place for place in there if f" {API}/" in place
    }
    others = {place.removeprefix("GET ") for place in there if f" {API}/" not in place}
    first_table = PAGE.read_text().partition("## ")[0]
    assert others == set(re.findall(r"^\| `(/[^`]*)` \|", first_table, re.MULTILINE)) - {
        f"{API}/...",
        "/openapi.json",
    }
