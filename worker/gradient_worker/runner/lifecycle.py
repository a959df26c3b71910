"""The life of one build at the runner, as a state machine.

A build runs until its main process ends or until something stops it: the agent's wish, its time, its
silence. To stop it, the runner first asks (SIGTERM) and, when the grace is over, kills (SIGKILL) again
and again until the main process is gone. The first cause of a stop is the reason that is reported;
later ones change nothing.

The end of the main process is the end of the build, whoever caused it. What it left behind is swept:
killed, again and again, until nothing is left or the sweep's own deadline is over (a process that the
kernel cannot kill must not hold the build for ever). Then the outputs are handed over to the agent's
user, and only then has the build ended: whoever learns of the end may read and move the outputs.
"""

from __future__ import annotations

import enum

__all__ = ["Act", "Event", "IllegalEvent", "Phase", "step"]


class Phase(enum.StrEnum):
    """Where a build is."""

    RUNNING = "running"
    TERMINATING = "terminating"
    KILLING = "killing"
    SWEEPING = "sweeping"
    HANDING_OVER = "handing-over"
    ENDED = "ended"


class Event(enum.StrEnum):
    """What happens to a build."""

    STOP = "stop"
    """Somebody or a deadline wants its end."""
    TIMER = "timer"
    """The time that the last act set is over."""
    EXITED = "exited"
    """The main process was reaped."""
    EMPTY = "empty"
    """Nothing of it is left, or the sweep's deadline is over."""
    HANDED_OVER = "handed-over"
    """The outputs belong to the agent's user."""


class Act(enum.StrEnum):
    """What the runner then does."""

    NOTHING = "nothing"
    TERMINATE = "terminate"
    KILL = "kill"
    SWEEP = "sweep"
    HAND_OVER = "hand-over"
    FINISH = "finish"


class IllegalEvent(Exception):  # noqa: N818 - named after what happened
    """An event that the table does not allow; nothing was changed."""


_TABLE = {
    (Phase.RUNNING, Event.STOP): (Phase.TERMINATING, Act.TERMINATE),
    (Phase.RUNNING, Event.EXITED): (Phase.SWEEPING, Act.SWEEP),
    (Phase.TERMINATING, Event.STOP): (Phase.TERMINATING, Act.NOTHING),
    (Phase.TERMINATING, Event.TIMER): (Phase.KILLING, Act.KILL),
    (Phase.TERMINATING, Event.EXITED): (Phase.SWEEPING, Act.SWEEP),
    (Phase.KILLING, Event.STOP): (Phase.KILLING, Act.NOTHING),
    (Phase.KILLING, Event.TIMER): (Phase.KILLING, Act.KILL),
    (Phase.KILLING, Event.EXITED): (Phase.SWEEPING, Act.SWEEP),
    (Phase.SWEEPING, Event.STOP): (Phase.SWEEPING, Act.NOTHING),
    (Phase.SWEEPING, Event.TIMER): (Phase.SWEEPING, Act.SWEEP),
    (Phase.SWEEPING, Event.EMPTY): (Phase.HANDING_OVER, Act.HAND_OVER),
    (Phase.HANDING_OVER, Event.STOP): (Phase.HANDING_OVER, Act.NOTHING),
    (Phase.HANDING_OVER, Event.HANDED_OVER): (Phase.ENDED, Act.FINISH),
    (Phase.ENDED, Event.STOP): (Phase.ENDED, Act.NOTHING),
}


def step(phase: Phase, event: Event) -> tuple[Phase, Act]:
    """The next phase and what is to be done; raises IllegalEvent where the table has no row."""
    try:
        return _TABLE[phase, event]
    except KeyError:
        raise IllegalEvent(f"a build that is {phase} cannot take {event}") from None
