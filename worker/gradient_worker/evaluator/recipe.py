"""A `gradient.toml` as typed data, and what can be wrong with each of its entries (pure).

What concerns several entries at once (names, inputs, cycles, clusters) is in `checks`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

from gradient_protocol.messages.shapes import FixedOutput

from gradient_worker.evaluator.entries import Entry
from gradient_worker.evaluator.environment import OUT, SOURCE, is_reserved
from gradient_worker.evaluator.positions import KeyPath
from gradient_worker.evaluator.problems import Problem

__all__ = ["Build", "Cluster", "Member", "Recipe", "parse"]

# Nix's letters of a name; 211 less the longest output suffix that still makes a valid store path.
_NAME = re.compile(r"[0-9A-Za-z+_?=][0-9A-Za-z+\-._?=]*")
_MAX_NAME_CHARS = 160
_OUTPUT_NAME = re.compile(r"[A-Za-z_][0-9A-Za-z+\-._]*")
_MAX_OUTPUT_CHARS = 40
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")

_BUILD_KEYS = (
    "name", "command", "inputs", "outputs", "system", "features", "env", "timeout", "max_silent",
    "prefer_local", "fixed_output",
)  # fmt: skip
_CLUSTER_KEYS = ("name", "same_zone", "retry_budget", "member")
_MEMBER_KEYS = ("build", "role", "primary", "pin")
# What a download has no use for, so that nobody waits for it to have an effect.
_NOT_FOR_DOWNLOADS = ("command", "inputs", "env", "outputs")


@dataclass(frozen=True, slots=True)
class Build:
    """One `[[build]]`. Lengths of time in seconds; `place` is its key path in the file.

    What is wrong with it has been told, and stands here as well as it could be read (a name that is
    missing as ""), so that the rest of the file can be checked too.
    """

    name: str
    command: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    system: str
    features: tuple[str, ...]
    env: Mapping[str, str]
    timeout_secs: float | None
    max_silent_secs: float | None
    prefer_local: bool
    fixed_output: FixedOutput | None
    place: KeyPath

    @property
    def needs(self) -> tuple[str, ...]:
        """The inputs that are builds."""
        return tuple(name for name in self.inputs if name != SOURCE)


@dataclass(frozen=True, slots=True)
class Member:
    """One `[[cluster.member]]`; `build` is the name of the build that it runs."""

    build: str
    role: str
    primary: bool
    pin: str | None
    place: KeyPath


@dataclass(frozen=True, slots=True)
class Cluster:
    """One `[[cluster]]`: builds that start together."""

    name: str
    same_zone: bool
    retry_budget: int
    members: tuple[Member, ...]
    place: KeyPath


@dataclass(frozen=True, slots=True)
class Recipe:
    """A file's entries, in their order."""

    builds: tuple[Build, ...]
    clusters: tuple[Cluster, ...]
    imports: tuple[str, ...]


def parse(text: str) -> tuple[Recipe, list[Problem]]:
    """The entries, as far as they could be read, and what is wrong with them, in the order of the file.

    Raises tomllib.TOMLDecodeError for what is not TOML at all, another ValueError or RecursionError for
    what the parser cannot hold.
    """
    problems: list[Problem] = []
    top = Entry(tomllib.loads(text), (), problems)
    top.known(("build", "cluster", "import"))
    builds = [_build(entry) for entry in top.entries("build")]
    clusters = [_cluster(entry) for entry in top.entries("cluster")]
    return Recipe(tuple(builds), tuple(clusters), top.texts("import")), problems


def _build(entry: Entry) -> Build:
    name = _name(entry)
    entry = entry.called("build", name)
    entry.known(_BUILD_KEYS)
    fixed_output = _fixed_output(entry)
    command = entry.texts("command")
    if fixed_output is None and "fixed_output" not in entry:
        if "command" not in entry:
            entry.problem("command is missing (a build has one, or fixed_output)", "command")
        elif entry.empty("command"):
            entry.problem("command is empty", "command")
    if "fixed_output" in entry:
        for key in _NOT_FOR_DOWNLOADS:
            if key in entry:
                entry.problem(f"a download (fixed_output) has no {key}", key)
    system = entry.text("system") or ("any" if fixed_output is None else "builtin")
    return Build(
        name=name or "",
        command=command,
        inputs=entry.texts("inputs"),
        outputs=_outputs(entry),
        system=system,
        features=entry.texts("features"),
        env=_env(entry),
        timeout_secs=entry.seconds("timeout"),
        max_silent_secs=entry.seconds("max_silent"),
        prefer_local=entry.flag("prefer_local"),
        fixed_output=fixed_output,
        place=entry.path,
    )


def _name(entry: Entry) -> str | None:
    name = entry.required_text("name")
    if name is None:
        return None
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME_CHARS:
        entry.problem(
            f"{name!r:.100} cannot be a name: at most {_MAX_NAME_CHARS} letters, digits and + - . _ ? =, "
            "no dash or dot first",
            "name",
        )
    elif name == SOURCE:
        entry.problem("the name 'source' stands for the source tree", "name")
    return name


def _outputs(entry: Entry) -> tuple[str, ...]:
    if "outputs" not in entry:
        return (OUT,)
    outputs = entry.texts("outputs")
    if entry.empty("outputs"):
        entry.problem("outputs is empty", "outputs")
    for index, output in enumerate(outputs):
        if not _OUTPUT_NAME.fullmatch(output) or len(output) > _MAX_OUTPUT_CHARS:
            entry.problem(f"{output!r:.60} cannot be the name of an output", "outputs", index)
        elif is_reserved(output):
            entry.problem(f"output {output!r} is a variable that every build has", "outputs", index)
        elif output in outputs[:index]:
            entry.problem(f"output {output!r} is there twice", "outputs", index)
    return outputs


def _env(entry: Entry) -> dict[str, str]:
    env = entry.text_map("env")
    for key, value in env.items():
        if not key or "=" in key or "\0" in key or "\0" in value:
            entry.problem(f"{key!r:.60} cannot be an environment variable", "env", key)
    return env


def _fixed_output(entry: Entry) -> FixedOutput | None:
    download = entry.table("fixed_output")
    if download is None:
        return None
    download.known(("url", "sha256"))
    url, sha256 = download.required_text("url"), download.required_text("sha256")
    if url is not None and not _URL.fullmatch(url):
        download.problem(f"{url!r:.100} is no URL", "url")
        return None
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        download.problem("sha256 must be 64 hexadecimal digits", "sha256")
        return None
    return None if url is None or sha256 is None else FixedOutput(url=url, sha256=sha256.lower())


def _cluster(entry: Entry) -> Cluster:
    name = entry.required_text("name")
    entry = entry.called("cluster", name)
    entry.known(_CLUSTER_KEYS)
    members = [member for each in entry.entries("member") if (member := _member(each)) is not None]
    if not entry.entries("member"):
        entry.problem("has no members; give it at least one [[cluster.member]]", "member")
    return Cluster(
        name=name or "",
        same_zone=entry.flag("same_zone"),
        retry_budget=entry.count("retry_budget", default=1),
        members=tuple(members),
        place=entry.path,
    )


def _member(entry: Entry) -> Member | None:
    entry.known(_MEMBER_KEYS)
    build, role = entry.required_text("build"), entry.required_text("role")
    primary, pin = entry.flag("primary"), entry.text("pin")
    return None if build is None else Member(build, role or "", primary, pin, entry.path)
