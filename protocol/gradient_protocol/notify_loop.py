"""The event loop's own word to the service manager: it turns, and this is what it does.

The pings come from the loop that does the work, so that one which is blocked falls silent and the
process is started again.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import trio

from gradient_protocol.notify import Notifier

__all__ = ["keep_informed"]

STATUS_SECS: Final = 5.0


async def keep_informed(
    notifier: Notifier,
    status: Callable[[], str],
    unheard: Callable[[OSError], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """READY, then the status whenever it is another one, and pings at half of the watchdog's time.

    `unheard` gets the error the first time that the manager cannot be reached, and again after it could.
    Ends at once where no manager listens.
    """
    tick_secs = min(STATUS_SECS, (notifier.watchdog_secs or 2 * STATUS_SECS) / 2)
    said = status()
    is_ready = reached = _tell(partial(notifier.ready, said), unheard, reached=True)
    task_status.started()
    while notifier.is_heard:
        if notifier.watchdog_secs is not None:
            reached = _tell(notifier.watchdog, unheard, reached=reached)
        await trio.sleep(tick_secs)
        now = status()
        if not is_ready:
            is_ready = reached = _tell(partial(notifier.ready, now), unheard, reached=reached)
        elif now != said or not reached:
            reached = _tell(partial(notifier.status, now), unheard, reached=reached)
        said = now


def _tell(say: Callable[[], None], unheard: Callable[[OSError], None], *, reached: bool) -> bool:
    try:
        say()
    except OSError as error:
        if reached:
            unheard(error)
        return False
    return True
