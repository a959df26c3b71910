"""Fetches the inputs that a build lacks (protocol.md, "Build steps": stage Prefetch).

Inputs come side by side, a bounded number at a time. Builds that lack the same path share one
download: the first to ask fetches, the others wait for it, and one of them takes over where the first
was stopped. An input that is held with other contents than the job names counts as missing.
"""

from collections.abc import Callable, Sequence
from typing import Final

import trio
from gradient_protocol.kinds import FailureKind, SpanKind
from gradient_protocol.messages.shapes import BuildInput

from gradient_worker.executor.failure import Failure, failure, inputs_unavailable
from gradient_worker.executor.spans import SpanLog
from gradient_worker.stores.base import Store
from gradient_worker.transfer import Downloaded, Lost, Stalled, Transfers

__all__ = ["InputFetcher", "missing_inputs"]

MAX_SIDE_BY_SIDE: Final = 16
"""Downloads of this worker at once: each may have a window of 4 MiB on its way."""

Outcome = Downloaded | Lost | Stalled


def missing_inputs(store: Store, inputs: Sequence[BuildInput]) -> list[BuildInput]:
    """Those that are not held, or not as the job names them."""
    missing = []
    for one in inputs:
        held = store.info(one.path)
        if held is None or held.nar_hash != one.nar_hash:
            missing.append(one)
    return missing


class InputFetcher:
    """One for the whole agent, so that builds share downloads.

    `measured(nar_bytes, secs)` is told each round that moved anything (scoring.md, "Worker Speed Signals").
    """

    def __init__(self, store: Store, transfers: Transfers, measured: Callable[[int, float], None]) -> None:
        self._store = store
        self._transfers = transfers
        self._measured = measured
        self._places = trio.Semaphore(MAX_SIDE_BY_SIDE)
        self._running: dict[tuple[str, str], trio.Event] = {}

    async def fetch(
        self,
        assignment_id: str,
        inputs: Sequence[BuildInput],
        spans: SpanLog,
        counted: Callable[[int, int], None],
    ) -> Failure | None:
        """Make all inputs present. None where that succeeded.

        `counted(done, total)` is told how many of those that were missing are there.
        """
        missing = missing_inputs(self._store, inputs)
        started, began = spans.now(), trio.current_time()
        outcomes: list[Outcome] = []
        done = 0

        async def one(wanted: BuildInput) -> None:
            nonlocal done
            outcome = await self._fetch_shared(assignment_id, wanted, spans)
            if outcome is not None:
                outcomes.append(outcome)
            if outcome is None or isinstance(outcome, Downloaded):
                done += 1
                counted(done, len(missing))

        if missing:
            counted(0, len(missing))
            async with trio.open_nursery() as nursery:
                for wanted in missing:
                    nursery.start_soon(one, wanted)
        loaded = [outcome for outcome in outcomes if isinstance(outcome, Downloaded)]
        nar_bytes = sum(outcome.info.nar_size for outcome in loaded)
        stored_bytes = sum(outcome.stored_bytes for outcome in loaded)
        spans.add(
            SpanKind.PREFETCH, started, nar_bytes=nar_bytes, stored_bytes=stored_bytes, paths=len(loaded)
        )
        failed = _failure(outcomes)
        if failed is None:
            self._measured(nar_bytes, trio.current_time() - began)
        return failed

    async def _fetch_shared(self, assignment_id: str, wanted: BuildInput, spans: SpanLog) -> Outcome | None:
        """None where another build fetched it meanwhile."""
        key = (wanted.path, wanted.nar_hash)
        while missing_inputs(self._store, [wanted]):
            other = self._running.get(key)
            if other is not None:
                await other.wait()
                continue
            self._running[key] = trio.Event()
            try:
                async with self._places:
                    return await self._transfers.download(assignment_id, wanted.path, wanted.nar_hash, spans)
            finally:
                self._running.pop(key).set()
        return None


def _failure(outcomes: Sequence[Outcome]) -> Failure | None:
    lost = [outcome for outcome in outcomes if isinstance(outcome, Lost)]
    if lost:
        return inputs_unavailable([outcome.path for outcome in lost], lost[0].reason)
    stalled = [outcome for outcome in outcomes if isinstance(outcome, Stalled)]
    if stalled:
        text = f"fetching {stalled[0].path} failed: {stalled[0].reason}"
        return failure(FailureKind.TRANSIENT, text)
    return None
