"""Where builds may have cgroups, from recorded texts of /proc and a tree of plain files."""

import os
from pathlib import Path

import pytest
from gradient_worker.runner import cgroups

V2 = "25 30 0:22 / {0} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "40 30 0:35 / {0}/memory rw,relatime shared:15 - cgroup cgroup rw,memory\n"
    "41 30 0:36 / {0}/cpu,cpuacct rw,relatime shared:16 - cgroup cgroup rw,cpu,cpuacct\n"
    "42 30 0:37 / {0}/freezer rw,relatime shared:17 - cgroup cgroup rw,freezer\n"
    "43 30 0:38 / {0}/devices rw,relatime shared:18 - cgroup cgroup rw,devices\n"
)
HYBRID = V1 + "44 30 0:39 / {0}/unified rw,relatime shared:19 - cgroup2 cgroup2 rw\n"
OWN_V1 = "7:memory:/worker\n5:freezer:/worker\n4:cpu,cpuacct:/worker\n3:devices:/\n1:name=systemd:/x\n"


def make(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "cgroup.procs").touch()


def discover(
    setting: str, mountinfo: str, own: str, root: Path, *, systemd: bool = False
) -> tuple[dict[str, str], str]:
    return cgroups.discover(setting, mountinfo.format(root), own, under_systemd=systemd)


def test_v2_alone(tmp_path: Path) -> None:
    make(tmp_path / "system.slice/w.service")
    group, reason = discover("auto", V2, "0::/system.slice/w.service\n", tmp_path)
    assert group == {"unified": f"{tmp_path}/system.slice/w.service"}
    assert str(tmp_path) in reason


def test_v1_takes_the_hierarchies_that_serve_builds(tmp_path: Path) -> None:
    for name in ("memory", "cpu,cpuacct", "freezer"):
        make(tmp_path / name / "worker")
    group, _ = discover("auto", V1, OWN_V1, tmp_path)
    assert group == {
        "memory": f"{tmp_path}/memory/worker",
        "cpuacct": f"{tmp_path}/cpu,cpuacct/worker",
        "freezer": f"{tmp_path}/freezer/worker",
    }


def test_beside_v1_memory_a_v2_hierarchy_does_the_rest(tmp_path: Path) -> None:
    for name in ("memory", "cpu,cpuacct", "freezer", "unified"):
        make(tmp_path / name / "worker")
    group, _ = discover("auto", HYBRID, OWN_V1 + "0::/worker\n", tmp_path)
    assert group == {"memory": f"{tmp_path}/memory/worker", "unified": f"{tmp_path}/unified/worker"}


def test_a_mount_of_a_part_of_the_tree(tmp_path: Path) -> None:
    make(tmp_path / "inner")
    mountinfo = V2.replace("0:22 / ", "0:22 /docker/abc ")
    assert discover("auto", mountinfo, "0::/docker/abc/inner\n", tmp_path)[0] == {
        "unified": f"{tmp_path}/inner"
    }
    group, reason = discover("auto", mountinfo, "0::/elsewhere\n", tmp_path)
    assert (group, "not visible" in reason) == ({}, True)


def test_under_systemd_only_what_is_marked_as_delegated(tmp_path: Path) -> None:
    make(tmp_path / "w.service")
    group, reason = discover("auto", V2, "0::/w.service\n", tmp_path, systemd=True)
    assert (group, "Delegate=yes" in reason) == ({}, True)
    try:
        os.setxattr(tmp_path / "w.service", "user.delegate", b"1")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    assert discover("auto", V2, "0::/w.service\n", tmp_path, systemd=True)[0]


@pytest.mark.parametrize(
    ("setting", "mountinfo", "said"),
    [
        ("off", V2, "switched off"),
        ("auto", "", "no cgroup file system"),
        ("{0}-beside/x", V2, "is not below"),
        ("{0}/not-there", V2, "is not there"),
        ("{0}/not-a-group", V2, "is not writable"),
    ],
)
def test_why_not(tmp_path: Path, setting: str, mountinfo: str, said: str) -> None:
    (tmp_path / "not-a-group").mkdir()
    group, reason = discover(setting.format(tmp_path), mountinfo, "0::/\n", tmp_path)
    assert group == {}
    assert said in reason
    assert "\n" not in reason


def test_a_given_path_is_taken_in_all_hierarchies(tmp_path: Path) -> None:
    make(tmp_path / "memory/mine")
    (tmp_path / "unified").mkdir()
    group, _ = discover(f"{tmp_path}/memory/mine", HYBRID, OWN_V1, tmp_path, systemd=True)
    assert group["memory"] == f"{tmp_path}/memory/mine"
    assert group["unified"] == f"{tmp_path}/unified/mine"


def test_on_v2_the_runner_moves_aside_before_children_get_controllers(tmp_path: Path) -> None:
    top = tmp_path / "w.service"
    make(top)
    (top / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    make(top / "runner")
    group, failure = cgroups.prepare({"unified": str(top)}, "gradient-x")
    assert (group, failure) == ({"unified": f"{top}/gradient-x"}, None)
    assert (top / "runner/cgroup.procs").read_text() == str(os.getpid())
    assert (top / "cgroup.subtree_control").read_text() == "+memory +io +cpu +pids"


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    parent = {"memory": str(tmp_path)}
    assert cgroups.create(parent, "b")["memory"] == f"{tmp_path}/b"
    assert cgroups.create(parent, "b")["memory"] == f"{tmp_path}/b.2"
    assert cgroups.remove({"memory": f"{tmp_path}/b"})
    assert cgroups.create(parent, "b")["memory"] == f"{tmp_path}/b"
