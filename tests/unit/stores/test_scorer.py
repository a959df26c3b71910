"""Scores follow the store, and only changes are handed out."""

from pathlib import Path

from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.server import Candidate, RequiredPath
from gradient_protocol.messages.worker import CandidateScore
from gradient_worker.scorer import Scorer
from gradient_worker.stores.base import PathInfo
from gradient_worker.stores.directory import DirectoryStore
from hypothesis import given
from hypothesis import strategies as st


class Held:
    """As much of a store as a scorer asks for."""

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def info(self, path: str) -> PathInfo | None:
        return PathInfo(path, "sha256:0", 1, ()) if path in self.paths else None


def candidate(job_id: str, required: str, outputs: str) -> Candidate:
    return Candidate(
        job_id=job_id,
        kind=JobKind.BUILD,
        required_paths=[RequiredPath(path=path, nar_size=ord(path)) for path in required],
        output_paths=list(outputs),
    )


def score(job_id: str, count: int, size: int, present: bool = False) -> CandidateScore:
    return CandidateScore(job_id=job_id, missing_count=count, missing_nar_size=size, outputs_present=present)


def make() -> tuple[Held, Scorer]:
    held = Held()
    return held, Scorer(held)  # type: ignore[arg-type]  # only `info` is asked for


def test_only_changed_scores_are_taken_and_only_once() -> None:
    held, scorer = make()
    held.paths = {"a"}
    scorer.add([candidate("1", "ab", "x"), candidate("2", "a", "y"), candidate("3", "", "")])
    assert scorer.take_changed() == [score("1", 1, 98), score("2", 0, 0), score("3", 0, 0)]
    assert scorer.take_changed() == []
    held.paths |= {"b", "unrelated"}
    scorer.note_changes(["b", "unrelated"])
    assert scorer.take_changed() == [score("1", 0, 0)]
    held.paths |= {"x"}
    scorer.note_changes(["x"])
    assert scorer.take_changed() == [score("1", 0, 0, present=True)]


def test_a_path_that_came_and_went_is_no_change() -> None:
    held, scorer = make()
    scorer.add([candidate("1", "a", "x")])
    scorer.take_changed()
    scorer.note_changes(["a", "a"])
    assert scorer.take_changed() == []
    held.paths = {"a"}
    scorer.note_changes(["a"])
    held.paths = set()
    scorer.note_changes(["a"])
    assert scorer.take_changed() == []


def test_a_candidate_that_comes_again_is_scored_anew() -> None:
    _, scorer = make()
    scorer.add([candidate("1", "a", "x")])
    scorer.take_changed()
    scorer.add([candidate("1", "a", "x")])
    assert scorer.take_changed() == [score("1", 1, 97)]
    scorer.remove(["1", "unknown"])
    scorer.note_changes(["a"])
    assert (scorer.take_changed(), len(scorer)) == ([], 0)


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("add"), st.sampled_from("123"), st.text("abc", max_size=4), st.text("bcd", max_size=3)
            ),
            st.tuples(st.just("remove"), st.sampled_from("123")),
            st.tuples(st.just("flip"), st.sampled_from("abcd")),
        ),
        max_size=30,
    )
)
def test_kept_scores_equal_scores_from_scratch(steps: list[tuple[str, ...]]) -> None:
    held, scorer = make()
    window: dict[str, Candidate] = {}
    taken: dict[str, CandidateScore] = {}
    for step in steps:
        match step:
            case "add", job_id, required, outputs:
                window[job_id] = candidate(job_id, required, outputs)
                scorer.add([window[job_id]])
            case "remove", job_id:
                window.pop(job_id, None)
                scorer.remove([job_id])
            case "flip", path:
                held.paths ^= {path}
                scorer.note_changes([path])
        taken.update((each.job_id, each) for each in scorer.take_changed())
        assert {job_id: taken[job_id] for job_id in window} == {
            job_id: scorer.score(each) for job_id, each in window.items()
        }


def test_it_hears_of_changes_from_a_real_store(tmp_path: Path) -> None:
    store = DirectoryStore.open(tmp_path / "worker")
    scorer = Scorer(store)
    store.subscribe(scorer.note_changes)
    path = "a" * 32 + "-thing"
    scorer.add([Candidate(job_id="1", kind=JobKind.BUILD, required_paths=[], output_paths=[path])])
    assert scorer.take_changed() == [score("1", 0, 0)]
    (tmp_path / "built").write_text("x")
    store.register_output(path, tmp_path / "built", [])
    assert scorer.take_changed() == [score("1", 0, 0, present=True)]
    store.close()
