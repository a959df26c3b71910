"""Agents that are killed and restarted under a running cluster: its programs notice a pause, nothing else."""

import signal
from pathlib import Path

from tests.acceptance.pool import Pool
from tests.acceptance.processes import wait_until
from tests.acceptance.trees import Build

CLUSTER = """
[[cluster]]
name = "pair"
retry_budget = 0
[[cluster.member]]
build = "a-1"
role = "left"
[[cluster.member]]
build = "b-1"
role = "right"
"""


def test_agents_restarted_under_a_cluster_cost_it_nothing(empty_pool: Pool, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    go = tmp_path / "go"
    meet = "gradient-cluster barrier begun --timeout 60"
    left = (
        f"{meet}; for n in 1 2 3; do gradient-cluster send count $n; done; touch {tmp_path}/left"
        f"; until test -e {go}; do sleep 0.1; done; gradient-cluster send count 4"
        "; gradient-cluster barrier ended --timeout 60; echo done > $out"
    )
    right = (
        f"{meet}; gradient-cluster recv count > $out; touch {tmp_path}/right"
        "; for n in 2 3 4; do gradient-cluster recv count --timeout 60 >> $out; done"
        "; cat $out; gradient-cluster barrier ended --timeout 60"
    )
    empty_pool.start_server()
    for name in ("host-a", "host-b"):
        empty_pool.start_worker(name, "--build-max-concurrent", "1")
    tree = empty_pool.tree(Build("a-1", left), Build("b-1", right), top=CLUSTER)
    evaluation = empty_pool.submit(tree)
    for name in ("left", "right"):
        wait_until(f"{name} has begun", (tmp_path / name).exists)
    empty_pool.workers["host-a"].process.end(signal.SIGKILL)
    empty_pool.workers["host-b"].process.end(signal.SIGTERM)
    go.touch()
    for name in ("host-a", "host-b"):
        empty_pool.restart_worker(name)
    view = empty_pool.ended(evaluation)
    # Without a retry to hide behind.
    assert view["status"] == "Completed", view
    (job,) = [build["id"] for build in view["builds"] if build["name"] == "b-1"]
    assert empty_pool.log_of(job).strip() == b"1234"
