"""Ids of the wire: UUID v7, from an injected clock and injected randomness.

The standard library has `uuid7` from Python 3.14 on only; and a simulation needs ids that a seed
decides, so the clock and the randomness are passed in.
"""

import random
import secrets
import time
import uuid
from collections.abc import Callable

__all__ = ["IdSource"]

_MILLISECONDS_MASK = (1 << 48) - 1


class IdSource:
    """Makes UUID v7 strings that sort by the time they were made.

    `clock` gives seconds since the epoch, `random_bits(n)` an integer of n random bits.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self._clock = clock
        self._random_bits = random_bits

    @classmethod
    def seeded(cls, seed: int, clock: Callable[[], float]) -> "IdSource":
        """Ids that a seed and a clock decide, for simulations and tests."""
        return cls(clock, random.Random(seed).getrandbits)  # noqa: S311 - reproducible on purpose

    def new(self) -> str:
        """A fresh id, 36 characters."""
        milliseconds = int(self._clock() * 1000) & _MILLISECONDS_MASK
        value = (milliseconds << 80) | (0x7 << 76) | (self._random_bits(12) << 64)
        value |= (0b10 << 62) | self._random_bits(62)
        return str(uuid.UUID(int=value))
