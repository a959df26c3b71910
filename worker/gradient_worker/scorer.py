"""What this worker would have to fetch for each candidate (scoring.md; protocol.md, "Offers and requests").

Kept up as candidates and store paths come and go: a path that changes touches the counts of the
candidates that name it, and nothing else. Lives on the event loop's thread; only `note_changes` may
be called from others.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gradient_protocol.messages import server, worker

from gradient_worker.stores.base import Store

__all__ = ["Scorer"]


@dataclass(slots=True)
class _Tracked:
    """A candidate's counts: paths and bytes not held, outputs in all and not held."""

    required: dict[str, int]
    outputs: tuple[str, ...]
    missing_count: int = 0
    missing_nar_size: int = 0
    missing_outputs: int = 0
    sent: worker.CandidateScore | None = None


@dataclass(slots=True)
class _Path:
    """A path that candidates name, and by which of them."""

    held: bool
    required_by: set[str] = field(default_factory=set)
    output_of: set[str] = field(default_factory=set)


class Scorer:
    """Scores of a window of candidates against a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._candidates: dict[str, _Tracked] = {}
        self._paths: dict[str, _Path] = {}
        # A dict for its order: which candidates may have another score than the one last taken.
        self._touched: dict[str, None] = {}
        self._noted: deque[str] = deque()

    def score(self, candidate: server.Candidate) -> worker.CandidateScore:
        """The score of one candidate as the store is now, without keeping it.

        For a cluster's member `outputs_present` counts as false, which only the caller knows.
        """
        held = self._store.info
        missing = {p.path: p.nar_size for p in candidate.required_paths if held(p.path) is None}
        return worker.CandidateScore(
            job_id=candidate.job_id,
            missing_count=len(missing),
            missing_nar_size=sum(missing.values()),
            outputs_present=bool(candidate.output_paths)
            and all(held(path) is not None for path in candidate.output_paths),
        )

    def add(self, candidates: Iterable[server.Candidate]) -> None:
        """Candidates joined the window; one that is there already is replaced, and scored anew."""
        self._apply_noted()
        for candidate in candidates:
            self._drop(candidate.job_id)
            self._track(candidate)

    def remove(self, job_ids: Iterable[str]) -> None:
        """Candidates left the window. Unknown ones are no error."""
        for job_id in job_ids:
            self._drop(job_id)

    def clear(self) -> None:
        """A new session: its window starts empty."""
        self._candidates.clear()
        self._paths.clear()
        self._touched.clear()

    def note_changes(self, paths: Iterable[str]) -> None:
        """Store paths came or went; looked at by the next call. A listener for `Store.subscribe`."""
        self._noted.extend(paths)

    def take_changed(self) -> list[worker.CandidateScore]:
        """Scores that differ from those taken before; they count as sent from here on."""
        self._apply_noted()
        changed = []
        for job_id in self._touched:
            tracked = self._candidates[job_id]
            score = worker.CandidateScore(
                job_id=job_id,
                missing_count=tracked.missing_count,
                missing_nar_size=tracked.missing_nar_size,
                outputs_present=bool(tracked.outputs) and not tracked.missing_outputs,
            )
            if score != tracked.sent:
                tracked.sent = score
                changed.append(score)
        self._touched.clear()
        return changed

    def __len__(self) -> int:
        """How many candidates are tracked."""
        return len(self._candidates)

    def _track(self, candidate: server.Candidate) -> None:
        job_id = candidate.job_id
        required = {p.path: p.nar_size for p in candidate.required_paths}
        tracked = _Tracked(required, tuple(dict.fromkeys(candidate.output_paths)))
        for path, nar_size in required.items():
            entry = self._entry(path)
            entry.required_by.add(job_id)
            if not entry.held:
                tracked.missing_count += 1
                tracked.missing_nar_size += nar_size
        for path in tracked.outputs:
            entry = self._entry(path)
            entry.output_of.add(job_id)
            tracked.missing_outputs += not entry.held
        self._candidates[job_id] = tracked
        self._touched[job_id] = None

    def _entry(self, path: str) -> _Path:
        entry = self._paths.get(path)
        if entry is None:
            entry = self._paths[path] = _Path(self._store.info(path) is not None)
        return entry

    def _drop(self, job_id: str) -> None:
        tracked = self._candidates.pop(job_id, None)
        if tracked is None:
            return
        self._touched.pop(job_id, None)
        for path in {*tracked.required, *tracked.outputs}:
            entry = self._paths[path]
            entry.required_by.discard(job_id)
            entry.output_of.discard(job_id)
            if not entry.required_by and not entry.output_of:
                del self._paths[path]

    def _apply_noted(self) -> None:
        while self._noted:
            path = self._noted.popleft()
            entry = self._paths.get(path)
            held = self._store.info(path) is not None
            if entry is not None and entry.held != held:
                entry.held = held
                self._shift(path, entry, -1 if held else 1)

    def _shift(self, path: str, entry: _Path, step: int) -> None:
        for job_id in sorted(entry.required_by):
            tracked = self._candidates[job_id]
            tracked.missing_count += step
            tracked.missing_nar_size += step * tracked.required[path]
            self._touched[job_id] = None
        for job_id in sorted(entry.output_of):
            self._candidates[job_id].missing_outputs += step
            self._touched[job_id] = None
