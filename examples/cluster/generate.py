"""Writes the source tree of this example: `python generate.py DIRECTORY`.

The recipe names the interpreter that runs this file, for a build inherits nothing: what a worker
should run must stand in the recipe.
"""

import json
import shutil
import sys
import sysconfig
from pathlib import Path

FILES = ("server.sh", "client.sh", "stream.py")
MEASURE_SECS = "1"
VERSION = "1.0"
# Build, role, script, primary: the first client's success is the cluster's.
MEMBERS = [
    ("server", "server", "server.sh", False),
    ("client-a", "client", "client.sh", True),
    ("client-b", "client", "client.sh", False),
]


def build(name: str, script: str, interpreter: str) -> str:
    """One `[[build]]` of the recipe."""
    command = ["/bin/sh", "-c", 'exec /bin/sh -eu "$SOURCE/$0"', script]
    # JSON strings and arrays of strings are TOML as well.
    return (
        "[[build]]\n"
        f"name = {json.dumps(f'{name}-{VERSION}')}\n"
        f"command = {json.dumps(command)}\n"
        'inputs = ["source"]\n'
        f"env = {{ PYTHON = {json.dumps(interpreter)}, MEASURE_SECS = {json.dumps(MEASURE_SECS)} }}\n"
        "timeout = 300\n"
    )


def member(name: str, role: str, *, primary: bool) -> str:
    """One `[[cluster.member]]`."""
    return (
        "[[cluster.member]]\n"
        f"build = {json.dumps(f'{name}-{VERSION}')}\n"
        f"role = {json.dumps(role)}\n"
        f"primary = {json.dumps(primary)}\n"
    )


def recipe(interpreter: str) -> str:
    """The whole `gradient.toml`."""
    builds = [build(name, script, interpreter) for name, _role, script, _primary in MEMBERS]
    cluster = '[[cluster]]\nname = "throughput"\nretry_budget = 1\n'
    members = [member(name, role, primary=primary) for name, role, _script, primary in MEMBERS]
    return "\n".join([*builds, cluster, *members])


def base_interpreter() -> str:
    """The interpreter itself, not the virtual environment around it."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = Path(sysconfig.get_config_var("BINDIR") or "") / version
    return str(installed if installed.exists() else Path(sys.executable).resolve())


def write(directory: Path) -> None:
    """Write the source tree into `directory`, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(Path(__file__).with_name(name), directory / name)
    (directory / "gradient.toml").write_text(recipe(base_interpreter()))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
