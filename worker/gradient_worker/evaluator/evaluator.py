"""The evaluation of a source tree with a `gradient.toml`, as a sequence of steps.

It waits for nothing itself: `advance` returns what is to be done next, and the caller, who has the
connection, comes back with the answer::

    step = evaluation.advance()
    Report      -> report it; advance()
    QueryKnown  -> ask the server; advance(KnownAnswer(...))
    NeedImport  -> have the paths built and fetch them; advance(ImportAnswer(...))
    Done        -> the end

`advance` reads files and computes, so it belongs in a thread; not always the same one.
"""

import os
import stat
import time
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradient_protocol.messages.shapes import EvalResult, EvalStats, Note

from gradient_worker.evaluator import checks, recipe
from gradient_worker.evaluator.environment import OUT, package_name
from gradient_worker.evaluator.graph import MAX_UNIT_BYTES, Graph, batches
from gradient_worker.evaluator.problems import Problem, notes, suggestion, syntax_note

__all__ = [
    "RECIPE_FILE",
    "Answer",
    "Done",
    "ImportAnswer",
    "KnownAnswer",
    "NeedImport",
    "QueryKnown",
    "RecipeEvaluation",
    "Report",
    "Step",
]

RECIPE_FILE = "gradient.toml"
# 10,000 builds are some 3 MB; what a file holds takes tens of times its size in memory.
MAX_RECIPE_BYTES = 32 * 1024 * 1024
MAX_BUILDS = 100_000
MAX_RECIPES = 100
# Paths in one question about known derivations: well under a message's 4 MiB.
_QUERY_PATHS = 5_000


@dataclass(frozen=True, slots=True)
class Report:
    """A part of the result, to be reported. All of it precedes an import that needs it."""

    result: EvalResult


@dataclass(frozen=True, slots=True)
class QueryKnown:
    """Which of these derivations does the server know?"""

    drv_paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NeedImport:
    """These outputs are to be built now, and fetched into the store."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The evaluation is over, with or without errors. `stats` has no peak of memory."""

    stats: EvalStats


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """The known ones among the paths asked for."""

    known: frozenset[str]


@dataclass(frozen=True, slots=True)
class ImportAnswer:
    """Where each path that was built lies on this host, and why each other one was not."""

    directories: Mapping[str, Path]
    failed: Mapping[str, str] = field(default_factory=dict)


Step = Report | QueryKnown | NeedImport | Done
Answer = KnownAnswer | ImportAnswer


@dataclass(frozen=True, slots=True)
class _File:
    """A recipe to be read: the tree it lies in, that tree's store path, and its name in messages."""

    directory: Path
    source: str
    label: str


class _FailedError(Exception):
    """The evaluation cannot go on."""

    def __init__(self, told: Sequence[Note]) -> None:
        super().__init__(told[0].message)
        self.notes = list(told)


class RecipeEvaluation:
    """One evaluation. `source` is the store path of the tree at `directory`; no `attrs` means all builds.

    `clock` and `cpu_clock` give seconds; the latter is asked only within `advance`.
    """

    def __init__(
        self,
        directory: Path,
        source: str,
        attrs: Sequence[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._files = [_File(directory, source, RECIPE_FILE)]
        self._attrs = tuple(dict.fromkeys(attrs))
        self._unresolved = dict.fromkeys(self._attrs)
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._started_at = clock()
        self._cpu_secs = 0.0
        self._graph = Graph()
        self._earlier = checks.Earlier()
        self._reported: set[str] = set()
        self._considered: set[str] = set()
        self._known: set[str] = set()
        self._settled: set[str] = set()
        self._steps = self._run()
        self._begun = False

    def advance(self, answer: Answer | None = None) -> Step:
        """The next step; `answer` is what the last one asked for, None where it asked for nothing.

        Raises OSError where a recipe cannot be read for a reason of this host's, StopIteration never;
        after Done it must not be called again.
        """
        before = self._cpu_clock()
        step = self._steps.send(answer) if self._begun else next(self._steps)
        self._begun = True
        self._cpu_secs += self._cpu_clock() - before
        return Done(self._stats()) if isinstance(step, Done) else step

    @property
    def progress(self) -> tuple[int, int]:
        """Of the derivations found so far, how many are reported or known, and how many there are."""
        return len(self._settled), len(self._considered)

    def _stats(self) -> EvalStats:
        return EvalStats(
            derivations=len(self._considered),
            known=len(self._known),
            wall_ms=round((self._clock() - self._started_at) * 1000),
            cpu_ms=round(self._cpu_secs * 1000),
        )

    def _run(self) -> Generator[Step, Answer | None, None]:
        try:
            # Grows while it is walked: each import appends the file it leads to.
            for file in self._files:
                yield from self._file(file)
            self._check_attrs()
        except _FailedError as failure:
            yield Report(EvalResult(derivations=[], clusters=[], warnings=[], errors=failure.notes))
        yield Done(self._stats())

    def _file(self, file: _File) -> Generator[Step, Answer | None, None]:
        if not self._wants_more():
            return
        text = _read(file)
        parsed = self._add(file, text)
        attrs = self._select(parsed)
        imports = parsed.imports if self._wants_more() else ()
        if not imports and file is self._files[-1]:
            self._check_attrs()
        yield from self._report(attrs, imports, _warnings(file, parsed))
        if imports:
            yield from self._import(file, text, imports)

    def _wants_more(self) -> bool:
        """Whether a further recipe could matter: everything is asked for, or something not found yet."""
        return not self._attrs or bool(self._unresolved)

    def _add(self, file: _File, text: str) -> recipe.Recipe:
        try:
            parsed, problems = recipe.parse(text)
        except tomllib.TOMLDecodeError as error:
            raise _FailedError([syntax_note(file.label, text, error)]) from None
        except ValueError as error:
            # A number of thousands of digits, which the interpreter refuses to read.
            raise _FailedError([Note(source=file.label, message=f"not valid: {error}")]) from None
        except RecursionError:
            raise _FailedError([Note(source=file.label, message="not valid: nested too deeply")]) from None
        problems += checks.check(parsed, self._earlier)
        if len(self._graph.nodes) + len(parsed.builds) > MAX_BUILDS:
            problems.append(Problem(("build",), f"over {MAX_BUILDS} builds"))
        groups = checks.order(parsed)
        if isinstance(groups, Problem):
            problems.append(groups)
        else:
            too_large = self._graph.add(parsed, groups, file.source) if not problems else []
            problems += [
                Problem(build.place, f"build {build.name!r}: over {MAX_UNIT_BYTES} bytes (with its cluster)")
                for build in too_large
            ]
        if problems:
            raise _FailedError(notes(file.label, text, problems))
        self._earlier = self._earlier.with_recipe(parsed)
        return parsed

    def _select(self, parsed: recipe.Recipe) -> dict[str, str]:
        """The builds of this file that are asked for, each with the words it was asked for by."""
        if not self._attrs:
            return {build.name: build.name for build in parsed.builds}
        selected: dict[str, str] = {}
        for attr in list(self._unresolved):
            names = [build.name for build in parsed.builds if build.name == attr]
            names = names or [build.name for build in parsed.builds if package_name(build.name) == attr]
            for name in names:
                selected.setdefault(name, attr)
            if names:
                del self._unresolved[attr]
        return selected

    def _check_attrs(self) -> None:
        names = [name for build in self._graph.nodes for name in (build, package_name(build))]
        told = [
            Note(source=RECIPE_FILE, message=f"no build is called {attr!r:.80}{suggestion(attr, names)}")
            for attr in self._unresolved
        ]
        if told:
            raise _FailedError(told)

    def _report(
        self, attrs: Mapping[str, str], imports: Sequence[str], warnings: list[Note]
    ) -> Generator[Step, Answer | None, None]:
        """Report what is asked for and what the imports need, less what the server knows."""
        names = [*attrs, *imports]
        needed = self._graph.closure(names)
        self._considered.update(node.build.name for node in needed)
        kept = {*attrs, *self._reported}
        unsure = [
            node.derivation.drv_path
            for node in needed
            if node.build.name not in kept
            and node.cluster is None
            and node.derivation.drv_path not in self._known
        ]
        for start in range(0, len(unsure), _QUERY_PATHS):
            asked = tuple(unsure[start : start + _QUERY_PATHS])
            answer = yield QueryKnown(asked)
            if not isinstance(answer, KnownAnswer):
                raise TypeError(f"QueryKnown was answered by {type(answer).__name__}")
            self._known |= answer.known & set(asked)
            self._settled |= answer.known & set(asked)
        nodes = [
            node
            for node in self._graph.closure(attrs, frozenset(self._known), also=imports)
            if node.build.name not in self._reported
        ]
        self._reported.update(node.build.name for node in nodes)
        # What a known one needs is known with it, and not walked.
        due = {node.derivation.drv_path for node in nodes}
        self._settled.update(
            node.derivation.drv_path for node in needed if node.derivation.drv_path not in due
        )
        for derivations, clusters in batches(self._graph, nodes, attrs):
            yield Report(EvalResult(derivations=derivations, clusters=clusters, warnings=warnings, errors=[]))
            self._settled.update(derivation.drv_path for derivation in derivations)
            warnings = []
        if warnings:
            yield Report(EvalResult(derivations=[], clusters=[], warnings=warnings, errors=[]))

    def _import(self, file: _File, text: str, imports: Sequence[str]) -> Generator[Step, Answer | None, None]:
        paths = {name: self._import_path(name) for name in dict.fromkeys(imports)}
        if len(self._files) + len(paths) > MAX_RECIPES:
            problem = Problem(("import",), f"over {MAX_RECIPES} recipes in one evaluation")
            raise _FailedError(notes(file.label, text, [problem]))
        answer = yield NeedImport(tuple(paths.values()))
        if not isinstance(answer, ImportAnswer):
            raise TypeError(f"NeedImport was answered by {type(answer).__name__}")
        problems = []
        for index, (name, path) in enumerate(paths.items()):
            directory = answer.directories.get(path)
            if directory is None:
                reason = answer.failed.get(path, "it was not built")
                problems.append(Problem(("import", index), f"import of {name!r}: {reason}"))
            else:
                self._files.append(_File(directory, path, f"{name}/{RECIPE_FILE}"))
        if problems:
            raise _FailedError(notes(file.label, text, problems))

    def _import_path(self, name: str) -> str:
        outputs = self._graph.nodes[name].derivation.outputs
        return next((output.path for output in outputs if output.name == OUT), outputs[0].path)


def _warnings(file: _File, parsed: recipe.Recipe) -> list[Note]:
    if parsed.builds or parsed.imports:
        return []
    return [Note(source=file.label, message="defines no builds")]


def _read(file: _File) -> str:
    """The recipe's text. It must be a file of the tree itself, for a symlink could lead anywhere."""
    try:
        descriptor = os.open(
            file.directory / RECIPE_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        )
    except (FileNotFoundError, NotADirectoryError):
        raise _FailedError([Note(source=file.label, message=f"there is no {RECIPE_FILE}")]) from None
    except OSError as error:
        message = f"{RECIPE_FILE} cannot be read: {error.strerror}"
        raise _FailedError([Note(source=file.label, message=message)]) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _FailedError([Note(source=file.label, message=f"{RECIPE_FILE} is not a file")])
    with os.fdopen(descriptor, "rb") as opened:
        data = opened.read(MAX_RECIPE_BYTES + 1)
    if len(data) > MAX_RECIPE_BYTES:
        raise _FailedError([Note(source=file.label, message=f"over {MAX_RECIPE_BYTES} bytes")])
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _FailedError([Note(source=f"{file.label}:{line}", message="not valid UTF-8")]) from None
