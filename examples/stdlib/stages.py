"""The steps that the recipe's builds run, on the standard library of the Python that runs them.

Every output is the same wherever and whenever it is made: paths are stripped, times are not kept,
names are sorted.
"""

import ast
import doctest
import hashlib
import importlib
import importlib.util
import json
import lzma
import marshal
import os
import py_compile
import shutil
import sys
import sysconfig
import tarfile
from pathlib import Path

STDLIB = Path(sysconfig.get_path("stdlib"))
# Not part of what this example works on: other people's packages, tests and generated data.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "__pycache__",
}


def library_files() -> list[Path]:
    """Every module of the standard library, relative to it, sorted."""
    found = []
    for folder, folders, files in os.walk(STDLIB):
        folders[:] = sorted(
            name for name in folders if name not in LEFT_OUT and not name.startswith("config-")
        )
        found += [Path(folder, name).relative_to(STDLIB) for name in files if name.endswith(".py")]
    return sorted(found)


def shard_of(path: Path, shards: int) -> int:
    """Modules of one package stay together, so that a check finds the whole package."""
    return hashlib.sha256(path.parts[0].encode()).digest()[0] % shards


def compile_shard(shard: int, shards: int, out: Path) -> None:
    """Copy one shard of the library and byte-compile it."""
    mine = [path for path in library_files() if shard_of(path, shards) == shard]
    for path in mine:
        target = out / "lib" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(STDLIB / path, target)
        compiled = out / "lib" / importlib.util.cache_from_source(str(path))
        compiled.parent.mkdir(parents=True, exist_ok=True)
        py_compile.compile(
            str(target),
            cfile=str(compiled),
            dfile=str(path),
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    print(f"compiled {len(mine)} modules of shard {shard + 1} of {shards}")


def manifest(out: Path) -> None:
    """Name, size and SHA-256 of every module."""
    rows = []
    for path in library_files():
        data = (STDLIB / path).read_bytes()
        rows.append({"path": str(path), "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    out.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows)} modules, {sum(row['size'] for row in rows)} bytes")


def check(modules: list[str], shards: list[Path], out: Path) -> None:
    """Run the examples in the documentation of these modules, as compiled by the shards."""
    sys.path[:0] = [str(shard / "lib") for shard in shards]
    report = {}
    # What the interpreter imported for itself comes from its own library: import it anew.
    for name in {name.partition(".")[0] for name in modules}:
        for loaded in [other for other in sys.modules if other.partition(".")[0] == name]:
            del sys.modules[loaded]
    for name in modules:
        module = importlib.import_module(name)
        if not any(Path(module.__file__ or "").is_relative_to(shard) for shard in shards):
            sys.exit(f"{name} was not imported from a shard but from {module.__file__}")
        failed, tried = doctest.testmod(module)
        if failed:
            sys.exit(f"{failed} of {tried} examples of {name} fail")
        report[name] = tried
        print(f"{name}: {tried} examples pass")
    out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")


def archive(shards: list[Path], out: Path) -> None:
    """One tar archive of some shards, with nothing in it that depends on where it was made."""
    with (
        lzma.open(out, "wb", preset=1) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        names = 0
        for shard in shards:
            for path in sorted(shard.rglob("*")):
                entry = tarfile.TarInfo(str(path.relative_to(shard)))
                if path.is_dir():
                    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(entry)
                    continue
                entry.size, entry.mode = path.stat().st_size, 0o644
                with path.open("rb") as source:
                    tar.addfile(entry, source)
                names += 1
    print(f"{names} files in {out.stat().st_size} bytes")


def index(archives: list[Path], listing: Path, out: Path) -> None:
    """What every module defines, read back from the archives and held against the manifest."""
    expected = {row["path"]: row["sha256"] for row in json.loads(listing.read_text())}
    symbols: dict[str, list[str]] = {}
    codes = 0
    for packed in archives:
        with tarfile.open(packed) as tar:
            for entry in tar:
                name = entry.name.removeprefix("lib/")
                content = tar.extractfile(entry)
                if content is None:
                    continue
                data = content.read()
                if name.endswith(".pyc"):
                    marshal.loads(data[16:])
                    codes += 1
                    continue
                if hashlib.sha256(data).hexdigest() != expected.pop(name):
                    sys.exit(f"{name} is not what the manifest says")
                tree = ast.parse(data)
                kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
                symbols[name] = [node.name for node in tree.body if isinstance(node, kinds)]
    if expected:
        sys.exit(f"{len(expected)} modules of the manifest are in no archive, {min(expected)} first")
    out.write_text(json.dumps(symbols, indent=1, sort_keys=True) + "\n")
    print(
        f"{sum(map(len, symbols.values()))} definitions in {len(symbols)} modules, {codes} code objects load"
    )


def bundle(parts: list[Path], out: Path) -> None:
    """Everything in one directory, with its checksums."""
    out.mkdir()
    sums = []
    for part in parts:
        name = part.name.partition("-")[2]
        shutil.copyfile(part, out / name)
        sums.append(f"{hashlib.sha256((out / name).read_bytes()).hexdigest()}  {name}\n")
    (out / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")


def inputs(*prefixes: str) -> list[Path]:
    """The paths of the inputs whose variables start so, in the order of their names."""
    return [Path(os.environ[name]) for name in sorted(os.environ) if name.startswith(prefixes)]


def main() -> None:
    """`stages.py STEP [ARGUMENT...]`, with the inputs and `out` in the environment."""
    step, *arguments = sys.argv[1:]
    out = Path(os.environ["out"])  # noqa: SIM112 - the build's variable is lower case
    if step == "compile":
        compile_shard(int(arguments[0]), int(arguments[1]), out)
    elif step == "manifest":
        manifest(out)
    elif step == "check":
        check(arguments, inputs("SHARD_"), out)
    elif step == "archive":
        archive(inputs("SHARD_"), out)
    elif step == "index":
        index(inputs("ARCHIVE_"), Path(os.environ["MANIFEST"]), out)
    elif step == "bundle":
        bundle(inputs("ARCHIVE_", "CHECK_", "INDEX", "MANIFEST"), out)
    else:
        sys.exit(f"unknown step {step!r}")


if __name__ == "__main__":
    main()
