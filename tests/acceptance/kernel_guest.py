"""What the cloud kernel's guest runs as its only program: real builds' worth of memory, by the real meters.

It has cgroup v2 alone, as current distributions boot. One line of JSON on the console tells what was read;
`test_cloud_kernel.py` judges it. Nothing but the standard library, the runner's cgroups and the meters.
"""

import json
import platform
import subprocess
import sys
import time
from pathlib import Path

from gradient_worker.meters.cgroup import BuildCgroup
from gradient_worker.runner import cgroups

MOUNT = "/sys/fs/cgroup"
# Moves itself into the build's group first, so that all it takes is counted there; then waits to be read.
CHILD = """
import sys, time
with open(sys.argv[1], "w") as file:
    file.write("0")
eaten = b"x" * (int(sys.argv[2]) << 20)
print("eaten", flush=True)
sys.stdin.read()
"""


def measure(
    parent: cgroups.Group, name: str, eaten_mb: int, limit_mb: int | None = None
) -> dict[str, object]:
    """What the meter says of one process that takes `eaten_mb`, after its end and the group's removal."""
    group = cgroups.create(parent, name)
    top = Path(group["unified"])
    if limit_mb is not None:
        (top / "memory.max").write_text(str(limit_mb << 20))
    meter = BuildCgroup({key: Path(path) for key, path in group.items()})
    [procs] = cgroups.procs_files(group)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, procs, str(eaten_mb)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    said = child.stdout.readline().strip()
    meter.sample()
    recorded = {file.name: file.read_text() for file in sorted(top.iterdir()) if file.name in RECORDED}
    cgroups.kill(group)
    status = child.wait()
    while not cgroups.is_empty(group):
        time.sleep(0.01)
    meter.sample()
    removed = cgroups.remove(group)
    meter.sample()
    peak = meter.peak_ram()
    return {
        "said": said,
        "status": status,
        "peak_mb": None if peak is None else peak.mb,
        "source": None if peak is None else str(peak.source),
        "anon_mb": meter.anon_peak_ram_mb(),
        "cpu_time_ms": meter.cpu_time_ms(),
        "oom_kills": meter.oom_kills(),
        "removed": removed,
        "recorded": recorded,
    }


RECORDED = frozenset(
    ["memory.peak", "memory.current", "memory.max", "memory.stat", "memory.events", "cpu.stat", "io.stat"]
)


def main() -> None:
    """Measures a build that has room, and one that has not."""
    mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    own = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    delegated, reason = cgroups.discover("auto", mountinfo, own, under_systemd=False)
    parent, failure = cgroups.prepare(delegated, "builds")
    answer = {
        "kernel": platform.release(),
        "reason": failure or reason,
        "roomy": measure(parent, "nix-build@roomy", 96),
        "tight": measure(parent, "nix-build@tight", 96, limit_mb=48),
    }
    sys.stdout.write("\nMEASURED " + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
