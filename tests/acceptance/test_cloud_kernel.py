"""`memory.peak` of a Debian cloud kernel, read by the real meters (design.md, "Worker facts").

Opt-in, for it needs qemu and a kernel, and emulates a whole machine: `GRADIENT_CLOUD_KERNEL` is the path of
a `vmlinuz` (docs/metering.md says how to get one). The guest is an initramfs with busybox, this machine's
Python and our packages; it needs no network and no disk.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

KERNEL = os.environ.get("GRADIENT_CLOUD_KERNEL", "")
GUEST_MB = 1024
BOOT_SECS = 400
INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t cgroup2 cgroup2 /sys/fs/cgroup
export PYTHONHOME={home} PYTHONPATH=/app PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH={libraries}
{python} /app/kernel_guest.py
/bin/busybox poweroff -f
"""
LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "site-packages", "idlelib", "ensurepip", "lib2to3", "tkinter", "config-*", "turtledemo"
)


def libraries_of(program: Path) -> list[Path]:
    """The shared libraries that it loads, with the loader itself."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return [Path(word) for line in listed.splitlines() for word in line.split() if word.startswith("/")]


def copied(path: Path, root: Path) -> None:
    """The file, with what a link leads to, at the same place below `root`."""
    target = root / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    target.chmod(0o755)


def package_of(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def initramfs(root: Path) -> None:
    """Everything that the guest has."""
    for name in ("proc", "sys", "dev", "tmp", "bin", "app"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None, "apt-get install busybox-static"
    shutil.copy(busybox, root / "bin/busybox")
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    stdlib = Path(sysconfig.get_path("stdlib"))
    libraries = libraries_of(python)
    for path in (python, *libraries):
        copied(path, root)
    shutil.copytree(stdlib, root / stdlib.relative_to("/"), ignore=LEFT_OUT)
    for name in ("gradient_worker", "gradient_protocol", "cgroupspy"):
        shutil.copytree(package_of(name), root / "app" / name, ignore=LEFT_OUT)
    shutil.copy(Path(__file__).with_name("kernel_guest.py"), root / "app")
    where = ":".join(sorted({str(path.parent) for path in libraries}))
    (root / "init").write_text(INIT.format(home=sys.base_prefix, libraries=where, python=python))
    (root / "init").chmod(0o755)


def boot(tmp_path: Path) -> dict[str, Any]:
    """What the guest measured."""
    root, image = tmp_path / "root", tmp_path / "initramfs"
    initramfs(root)
    names = "\0".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    pack = ["cpio", "-o", "-0", "-H", "newc", "--quiet"]
    with image.open("wb") as out:
        subprocess.run(pack, cwd=root, input=names.encode(), stdout=out, check=True)
    command = [
        "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", str(GUEST_MB), "-smp", "1", "-nographic",
        "-no-reboot", "-nic", "none", "-kernel", KERNEL, "-initrd", str(image),
        "-append", "console=ttyS0 panic=-1 quiet cgroup_no_v1=all",
    ]  # fmt: skip
    console = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=BOOT_SECS, check=True
    ).stdout
    told = [line for line in console.splitlines() if line.startswith("MEASURED ")]
    assert told, console[-4000:]
    measured: dict[str, Any] = json.loads(told[0].removeprefix("MEASURED "))
    return measured


def test_memory_peak_of_a_cloud_kernel_is_the_truth_within_ten_percent(tmp_path: Path) -> None:
    measured = boot(tmp_path)
    (tmp_path / "measured.json").write_text(json.dumps(measured, indent=1))
    roomy, tight = measured["roomy"], measured["tight"]
    assert (roomy["said"], roomy["source"]) == ("eaten", "peak")
    # What the interpreter took before it joined the group is not in it.
    assert roomy["peak_mb"] == pytest.approx(96, rel=0.1)
    assert 96 <= roomy["anon_mb"] <= roomy["peak_mb"]
    assert roomy["oom_kills"] == 0
    assert roomy["cpu_time_ms"] > 0
    # Killed by the kernel at its limit: it is told from a kill by us, and its peak is marked.
    assert (tight["said"], tight["oom_kills"], tight["source"]) == ("", 1, "capped")
    # When it could be read, no process was left whose anonymous memory might be told.
    assert (tight["peak_mb"], tight["anon_mb"]) == (48, None)
    assert roomy["removed"]
    assert tight["removed"]
