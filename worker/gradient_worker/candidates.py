"""One session's window on the queue, and the answers that the server waits for.

JobListChunk and JobOffer add candidates, RevokeJob takes them away (protocol.md, "Offers and
requests"). A score is sent when it is new or has changed; `is_final` closes the answer to one chunk
or offer, even an empty one, and is false where nobody asked.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from gradient_protocol.errors import ProtocolError
from gradient_protocol.limits import MAX_WINDOW_CANDIDATES
from gradient_protocol.messages.server import Candidate
from gradient_protocol.messages.worker import CandidateScores

from gradient_worker.scorer import Scorer

__all__ = ["Candidates"]

MAX_OPEN_ANSWERS: Final = 10_000
"""Chunks and offers whose answers are not closed; a server further ahead than this is broken."""


class Candidates:
    """The window; it starts empty. Lives on the event loop's thread."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._open_answers = 0

    def offer(self, candidates: Sequence[Candidate]) -> None:
        """A chunk or an offer arrived. ProtocolError 413 beyond the window's bound."""
        self._scorer.add(candidates)
        self._open_answers += 1
        if len(self._scorer) > MAX_WINDOW_CANDIDATES or self._open_answers > MAX_OPEN_ANSWERS:
            raise ProtocolError(413, f"over {MAX_WINDOW_CANDIDATES} candidates were offered")

    def revoke(self, job_ids: Iterable[str]) -> None:
        """Candidates left the window; one that is not there is ignored."""
        self._scorer.remove(job_ids)

    def due(self) -> CandidateScores | None:
        """The next message to send; None where nothing changed and nobody waits."""
        changed = self._scorer.take_changed()
        if self._open_answers:
            self._open_answers -= 1
            return CandidateScores(scores=changed, is_final=True)
        return CandidateScores(scores=changed, is_final=False) if changed else None
