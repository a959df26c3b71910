"""Loads what the book of histories wants, in batches, and the instance windows, at an interval.

Both only read, beside the writers. What cannot be read is unknown for a while, with a warning: a job is
then ranked as one without history, and windows that failed are empty (scoring.md, "Instance Windows").
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import sqlalchemy as sa
import structlog
import trio
from gradient_protocol.kinds import EvalStep, JobKind, SpanKind

from gradient_server.clock import Clock
from gradient_server.db.errors import DatabaseClosedError, first_line
from gradient_server.db.queries import history as queries
from gradient_server.db.queries import windows
from gradient_server.db.runner import Database
from gradient_server.history.book import HistoryBook, HistoryKey
from gradient_server.history.prediction import predict, predict_evaluation
from gradient_server.history.windows import (
    DAY_SECS,
    EVALUATIONS_SECS,
    HOUR_SECS,
    WINDOWS_SECS,
    EvalDurations,
    WindowsSnapshot,
    eval_durations,
)
from gradient_server.scoring.contexts import HistoryPrediction

__all__ = ["HistoryLoader", "WindowsPass", "load_predictions"]

log = structlog.get_logger(__name__)

T = TypeVar("T")

_BATCH: Final = 128
_REFRESH_SECS: Final = 1.0

# Told of a waiting job and its new prediction.
SwapIn = Callable[[str, HistoryPrediction], None]


def load_predictions(
    connection: sa.Connection,
    keys: Sequence[HistoryKey],
    durations: EvalDurations,
    *,
    since: float,
    now: float,
) -> dict[HistoryKey, HistoryPrediction]:
    """The predictions of these keys, from rows not older than `since`.

    One query each, and one more for output sizes where there are rows.
    """
    found: dict[HistoryKey, HistoryPrediction] = {}
    peaks: dict[str, list[float]] = {}
    for key in keys:
        if key.kind is JobKind.EVAL:
            if key.name not in peaks:
                peaks[key.name] = queries.evaluation_peaks(connection, key.name, now=now)
            found[key] = predict_evaluation(
                peaks[key.name],
                durations.of(key.name),
                fetches=EvalStep.FETCH in key.steps,
                evaluates=EvalStep.EVALUATE in key.steps,
            )
            continue
        rows = queries.metric_rows(connection, (key.name, key.architecture), since=since)
        found[key] = predict(rows, queries.output_sizes(connection, (row.derivation for row in rows)))
    return found


class HistoryLoader:
    """Serves one book."""

    def __init__(
        self, database: Database, book: HistoryBook, *, clock: Clock, retention_days: float, swap_in: SwapIn
    ) -> None:
        self._database = database
        self._book = book
        self._clock = clock
        self._retention_secs = retention_days * DAY_SECS
        self._swap_in = swap_in
        self._wanted = trio.Event()
        self.durations = EvalDurations()
        book.wake = self._wake

    def set_durations(self, durations: EvalDurations) -> None:
        """What evaluations take was measured anew."""
        if durations != self.durations:
            self.durations = durations
            self._book.outdate_evaluations()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Loads whatever is wanted, for ever: what jobs wait for at once, what became stale once a second."""
        task_status.started()
        refresh_at = trio.current_time() + _REFRESH_SECS
        while True:
            with trio.move_on_at(refresh_at):
                await self._wanted.wait()
                self._wanted = trio.Event()
            if trio.current_time() >= refresh_at:
                self._book.want_outdated()
                refresh_at = trio.current_time() + _REFRESH_SECS
            while await self.load_batch():
                pass

    async def load_batch(self) -> bool:
        """Loads the next keys and tells of every waiting job they concern. False: none was wanted."""
        keys = self._book.take_wanted(_BATCH)
        if not keys:
            return False
        now, durations = self._clock.now(), self.durations
        since = now - self._retention_secs
        try:
            loaded = await self._database.read(
                lambda connection: load_predictions(connection, keys, durations, since=since, now=now)
            )
        except DatabaseClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, jobs must not wait for it
            log.warning("histories could not be loaded", keys=len(keys), error=first_line(error))
            changed = self._book.missed(keys)
        else:
            changed = self._book.put(loaded)
        for job_id, prediction in changed:
            self._swap_in(job_id, prediction)
        return True

    def _wake(self) -> None:
        self._wanted.set()


class WindowsPass:
    """Takes a snapshot of the windows, then publishes it in one step."""

    def __init__(
        self,
        database: Database,
        *,
        clock: Clock,
        interval_secs: float,
        publish: Callable[[WindowsSnapshot], None],
    ) -> None:
        self._database = database
        self._clock = clock
        self._interval_secs = interval_secs
        self._publish = publish

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """A pass every interval; one that takes longer is followed by the next at once."""
        task_status.started()
        while True:
            began = trio.current_time()
            self._publish(await self.take())
            await trio.sleep_until(began + self._interval_secs)

    async def take(self) -> WindowsSnapshot:
        """Everything measured up to now; what failed is empty, and named."""
        now = self._clock.now()
        failed: list[str] = []

        async def read(name: str, query: Callable[[sa.Connection], T]) -> T | None:
            try:
                return await self._database.read(query)
            except DatabaseClosedError:
                raise
            except Exception as error:  # noqa: BLE001 - its windows are empty, the others are not
                log.warning("an instance window could not be read", window=name, error=first_line(error))
                failed.append(name)
                return None

        async def in_each_window(name: str, query: Callable[..., T]) -> tuple[T | None, ...]:
            return tuple(
                [
                    await read(f"{name} of {secs:g} s", partial(query, since=now - secs, until=now))
                    for secs in WINDOWS_SECS
                ]
            )

        hour, day = now - HOUR_SECS, now - DAY_SECS
        peak = partial(windows.peak_throughput_mbps, since=hour, now=now)
        fit = partial(windows.fit_sums, since=day, now=now)
        by_task = await read(
            "evaluations", partial(windows.eval_sums, since=now - EVALUATIONS_SECS, until=now)
        )
        ratio = partial(windows.stored_to_nar_ratio, since=hour, now=now)
        return WindowsSnapshot(
            taken_at=now,
            builds=await in_each_window("builds", windows.build_averages),
            waits=await in_each_window("waits", windows.wait_averages),
            medians_ms=await in_each_window("build times", windows.median_build_time_ms),
            read_mbps=await read("storage reads", partial(peak, kind=SpanKind.NAR_FETCH)),
            write_mbps=await read("storage writes", partial(peak, kind=SpanKind.NAR_PUSH)),
            stored_per_nar_byte=await read("stored bytes", ratio),
            prefetches=await read("prefetches", partial(fit, kind=SpanKind.PREFETCH)),
            substitutions=await read("substitutions", partial(fit, kind=SpanKind.SUBSTITUTE_FETCH)),
            evaluations=eval_durations(by_task or {}),
            failed=tuple(failed),
        )
