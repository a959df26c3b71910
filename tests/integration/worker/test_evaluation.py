"""A real agent evaluates recipes that a scripted server hands it."""

import subprocess
from pathlib import Path

import pytest
import trio
from gradient_protocol.kinds import EvalStage, EvalStep, FailureKind, SpanKind
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_worker import session as session_module

from tests.fakes.agent import Rig, store_path
from tests.fakes.nars import stored_tree

HELLO = """
[[build]]
name = "hello-1.0"
command = ["/bin/sh", "-c", "echo hi > $out"]
"""


def evaluation(source: shapes.Source, *steps: EvalStep, timeout_secs: float = 60) -> server.AssignJob:
    job = shapes.EvalJob(
        project="p",
        task="main",
        evaluation="e",
        steps=list(steps),
        source=source,
        attrs=[],
        timeout_secs=timeout_secs,
    )
    return server.AssignJob(job_id="eval", assignment_id="evaluation-1", job=job)


def put_source(rig: Rig, root: Path, recipe: str, letter: str = "s") -> shapes.PathSource:
    root.mkdir()
    (root / "gradient.toml").write_text(recipe)
    path = store_path(letter, "source")
    rig.server.paths[path] = stored_tree(root)
    return shapes.PathSource(path=path)


async def test_a_source_is_fetched_and_evaluated(rig: Rig, nursery: trio.Nursery, tmp_path: Path) -> None:
    source = put_source(rig, tmp_path / "source", HELLO)
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(evaluation(source, EvalStep.FETCH, EvalStep.EVALUATE))
        fetched = (await session.expect(w.JobUpdate, lambda m: m.seq == 1)).update
        assert fetched.nar_hash == rig.server.paths[source.path].nar_hash
        result = (await session.expect(w.JobUpdate, lambda m: m.seq == 2)).update
        assert [d.drv_path for d in result.derivations] == ["3hgapfbfpym67mny7gaq75qm4x4nw19x-hello-1.0.drv"]
        stats = (await session.expect(w.JobUpdate, lambda m: m.seq == 3)).update
        assert (stats.derivations, stats.known) == (1, 0)
        completed = await session.expect(w.JobCompleted)
        assert {SpanKind.FETCH, SpanKind.EVALUATION} <= {span.kind for span in completed.spans}
        stages = [m.update.stage for m in session.messages if isinstance(m, w.JobUpdate)]
        assert stages == [EvalStage.FETCHING, EvalStage.EVALUATING_DERIVATIONS]


async def test_errors_of_a_recipe_complete_the_job(rig: Rig, nursery: trio.Nursery, tmp_path: Path) -> None:
    source = put_source(rig, tmp_path / "source", '[[build]]\nname = "a-1"\ncomand = ["x"]\n')
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(evaluation(source, EvalStep.EVALUATE))
        result = (await session.expect(w.JobUpdate, lambda m: m.seq == 1)).update
        assert any("comand" in note.message for note in result.errors)
        assert (await session.expect(w.EvalMessage)).source
        await session.expect(w.JobCompleted)


async def test_known_derivations_are_asked_for_and_an_import_is_read(
    rig: Rig, nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "PROGRESS_SECS", 0.02)
    recipe = (
        'import = ["more-1"]\n'
        '[[build]]\nname = "dep-1"\ncommand = ["true"]\n'
        '[[build]]\nname = "more-1"\ninputs = ["dep-1"]\ncommand = ["true"]\n'
    )
    source = put_source(rig, tmp_path / "source", recipe)
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(evaluation(source, EvalStep.EVALUATE))
        imported = None
        while imported is None:
            with trio.fail_after(10):
                query = await session.expect_any(w.QueryKnownDerivations, w.ImportRequest)
            if isinstance(query, w.QueryKnownDerivations):
                found = await session.expect(w.EvalProgress)
                assert (found.assignment_id, found.done, found.total) == ("evaluation-1", 0, 2)
                session.send(server.KnownDerivations(query_id=query.query_id, known=[]))
            else:
                imported = query
        assert rig.server.reports["evaluation-1"], "what an import needs is reported before it"
        await session.expect(w.EvalProgress, lambda m: (m.done, m.total) == (2, 2))
        put_source(rig, tmp_path / "imported", HELLO.replace("hello", "later"))
        rig.server.paths[imported.paths[0]] = rig.server.paths.pop(source.path)
        rig.server.paths[imported.paths[0]] = stored_tree(tmp_path / "imported")
        session.send(server.ImportResult(query_id=imported.query_id, ready=list(imported.paths), failed={}))
        await session.expect(w.JobCompleted)
        names = [
            derivation.name
            for report in rig.server.reports["evaluation-1"]
            if isinstance(report, w.JobUpdate) and isinstance(report.update, shapes.EvalResult)
            for derivation in report.update.derivations
        ]
        assert sorted(names) == ["dep-1", "later-1.0", "more-1"]


async def test_a_query_is_asked_again_on_the_next_session(
    rig: Rig, nursery: trio.Nursery, tmp_path: Path
) -> None:
    recipe = 'import = ["more-1"]\n[[build]]\nname = "more-1"\ncommand = ["true"]\n'
    source = put_source(rig, tmp_path / "source", recipe)
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(evaluation(source, EvalStep.EVALUATE))
        first = await session.expect(w.ImportRequest)
        session.scope.cancel()
        session = await rig.server.session(nursery)
        second = await session.expect(w.ImportRequest)
        assert (second.paths, second.query_id != first.query_id) == (first.paths, True)
        session.send(server.CacheError(query_id=second.query_id, code=500, reason="no"))
        assert (await session.expect(w.JobFailed)).kind is FailureKind.TRANSIENT


async def test_an_evaluation_that_waits_too_long_times_out(
    rig: Rig, nursery: trio.Nursery, tmp_path: Path
) -> None:
    recipe = 'import = ["more-1"]\n[[build]]\nname = "more-1"\ncommand = ["true"]\n'
    source = put_source(rig, tmp_path / "source", recipe)
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(evaluation(source, EvalStep.EVALUATE, timeout_secs=0.3))
        assert (await session.expect(w.JobFailed)).kind is FailureKind.TIMEOUT


async def test_a_git_source_is_fetched_and_uploaded(rig: Rig, nursery: trio.Nursery, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "gradient.toml").write_text(HELLO)
    try:
        for arguments in (
            ["init", "-q", "-b", "main"],
            ["add", "."],
            ["-c", "user.name=n", "-c", "user.email=e@example.org", "commit", "-qm", "first"],
        ):
            subprocess.run(["git", *arguments], cwd=repository, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    async with rig.agent():
        session = await rig.server.session(nursery)
        source = shapes.GitSource(url=repository.as_uri())
        session.send(evaluation(source, EvalStep.FETCH, EvalStep.EVALUATE))
        fetched = (await session.expect(w.JobUpdate, lambda m: m.seq == 1)).update
        await session.expect(w.JobCompleted)
        assert fetched.rev
        assert fetched.path.endswith("-source")
        assert fetched.path in rig.server.paths
