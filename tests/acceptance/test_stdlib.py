"""The example, real work on real files, on three workers over TLS with an authority made on the spot."""

import hashlib
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zstandard
from gradient_protocol.nar import pack

from tests.acceptance.pool import Pool, Worker, by_name

Json = dict[str, Any]

GENERATOR = Path(__file__).parents[2] / "examples/stdlib/generate.py"
WORKERS = ("host-a", "host-b", "host-c")
AGAIN_SECS = 2.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's source tree."""
    directory = tmp_path_factory.mktemp("example") / "stdlib"
    subprocess.run([sys.executable, str(GENERATOR), str(directory)], check=True)
    shutil.rmtree(directory / "__pycache__", ignore_errors=True)
    return directory


@pytest.fixture(scope="module")
def farm() -> Iterator[Pool]:
    """Three workers over TLS."""
    with Pool() as made:
        made.start_tls_server()
        for name in WORKERS:
            flags = ("--server-ca-file", str(made.ca_file), "--build-max-concurrent", "2")
            made.start_worker(name, *flags, wait=False)
        made.wait_connected(*WORKERS)
        yield made


@pytest.fixture(scope="module")
def built(farm: Pool, tree: Path) -> Json:
    """The evaluation of the whole example, as `gradient build --json` prints it."""
    return farm.gradient_json("build", tree)


def dump(path: Path) -> str:
    """SHA-256 of what Nix itself makes of a path."""
    done = subprocess.run(["nix-store", "--dump", str(path)], capture_output=True, check=True)
    return hashlib.sha256(done.stdout).hexdigest()


def packed(path: Path) -> str:
    """SHA-256 of what we make of it."""
    hasher = hashlib.sha256()
    for chunk in pack(path):
        hasher.update(chunk)
    return hasher.hexdigest()


def held(pool: Pool) -> dict[str, str]:
    """SHA-256 of every NAR in the server's store, unpacked from its object, by store path."""
    with closing(sqlite3.connect(f"file:{pool.server_dir}/gradient.db?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT path, object, nar_hash, nar_size FROM cached_path").fetchall()
    found = {}
    for path, name, nar_hash, nar_size in rows:
        (file,) = (pool.server_dir / "nar/objects").rglob(name)
        with zstandard.open(file, "rb") as nar:
            data = nar.read()
        found[path] = hashlib.sha256(data).hexdigest()
        assert (nar_hash, nar_size) == (f"sha256:{found[path]}", len(data)), path
    return found


def stored(worker: Worker) -> list[Path]:
    """Every path in a worker's store."""
    return sorted(path for path in worker.store.iterdir() if path.name[32:33] == "-")


def test_every_build_succeeds_and_every_worker_is_used(built: Json) -> None:
    assert built["status"] == "Completed"
    assert {build["status"] for build in built["builds"]} == {"Completed"}
    assert len(built["builds"]) >= 24
    assert {build["worker"] for build in built["builds"]} == set(WORKERS)
    assert max(output["nar_size"] for output in built["outputs"]) > 1024 * 1024


def test_a_second_submission_builds_nothing_and_ends_at_once(farm: Pool, tree: Path, built: Json) -> None:
    again = farm.gradient_json("build", tree)
    assert again["status"] == "Completed"
    assert again["finished_at"] - again["created_at"] < AGAIN_SECS
    assert {build["id"] for build in again["builds"]} == {build["id"] for build in built["builds"]}
    assert again["outputs"] == built["outputs"]
    for build in again["builds"]:
        assert build["finished_at"] <= built["finished_at"], build


@pytest.mark.skipif(shutil.which("nix-store") is None, reason="nix-store is not installed here")
def test_nars_are_those_of_nix_wherever_they_lie(farm: Pool, built: Json) -> None:
    objects = held(farm)
    outputs = {output["path"] for output in built["outputs"]}
    assert outputs <= objects.keys()
    seen: set[str] = set()
    for name in WORKERS:
        for path in stored(farm.workers[name]):
            assert packed(path) == dump(path) == objects[path.name], (name, path.name)
            seen.add(path.name)
    assert outputs <= seen


def test_paths_and_contents_are_the_same_on_another_host(farm: Pool, tree: Path, built: Json) -> None:
    """Built from nothing by a server and a worker that share nothing with the first."""
    with Pool() as elsewhere:
        elsewhere.start_server()
        worker = elsewhere.start_worker("host-z")
        view = elsewhere.gradient_json("build", tree, "archive-a")
        assert view["status"] == "Completed"
        assert by_name(view).keys() < by_name(built).keys()
        there, here = held(elsewhere), held(farm)
        assert view["source_path"] == built["source_path"]
        for path in stored(worker):
            assert there[path.name] == here[path.name], path.name
        assert len(stored(worker)) == len(view["builds"]) + 1
