"""Writes the source tree of this example: `python generate.py DIRECTORY`.

The recipe names the interpreter that runs this file, for a build inherits nothing: what a worker
should run must stand in the recipe.
"""

import json
import shutil
import string
import sys
import sysconfig
from pathlib import Path

SHARDS = 16
SHARDS_AN_ARCHIVE = 4
# Modules whose documentation has examples to run.
CHECKS = {
    "collections": ["collections", "heapq"],
    "cookies": ["http.cookies"],
    "difflib": ["difflib"],
    "json": ["json", "json.encoder"],
    "pickle": ["pickle", "pickletools"],
    "statistics": ["statistics"],
}
VERSION = "1.0"


def build(name: str, arguments: list[str], inputs: list[str], interpreter: str) -> str:
    """One `[[build]]` of the recipe."""
    command = ["/bin/sh", "-c", '"$PYTHON" -I -S "$SOURCE/stages.py" "$@"', name, *arguments]
    full_inputs = ["source", *(f"{other}-{VERSION}" for other in inputs)]
    # JSON strings and arrays of strings are TOML as well.
    return (
        "[[build]]\n"
        f"name = {json.dumps(f'{name}-{VERSION}')}\n"
        f"command = {json.dumps(command)}\n"
        f"inputs = {json.dumps(full_inputs)}\n"
        f"env = {{ PYTHON = {json.dumps(interpreter)} }}\n"
    )


def recipe(interpreter: str) -> str:
    """The whole `gradient.toml`."""
    letters = string.ascii_lowercase[:SHARDS]
    shards = [f"shard-{letter}" for letter in letters]
    builds = [
        build(shard, ["compile", str(number), str(SHARDS)], [], interpreter)
        for number, shard in enumerate(shards)
    ]
    builds.append(build("manifest", ["manifest"], [], interpreter))
    archives = []
    for start in range(0, SHARDS, SHARDS_AN_ARCHIVE):
        archives.append(f"archive-{letters[start]}")
        builds.append(
            build(archives[-1], ["archive"], shards[start : start + SHARDS_AN_ARCHIVE], interpreter)
        )
    checks = [f"check-{name}" for name in CHECKS]
    for check, modules in zip(checks, CHECKS.values(), strict=True):
        builds.append(build(check, ["check", *modules], shards, interpreter))
    builds.append(build("index", ["index"], [*archives, "manifest"], interpreter))
    builds.append(build("bundle", ["bundle"], [*archives, *checks, "index", "manifest"], interpreter))
    return "\n".join(builds)


def base_interpreter() -> str:
    """The interpreter itself, not the virtual environment around it."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = Path(sysconfig.get_config_var("BINDIR") or "") / version
    return str(installed if installed.exists() else Path(sys.executable).resolve())


def write(directory: Path) -> None:
    """Write the source tree into `directory`, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("stages.py"), directory / "stages.py")
    (directory / "gradient.toml").write_text(recipe(base_interpreter()))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
