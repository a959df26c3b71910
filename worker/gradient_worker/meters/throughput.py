"""Speeds as moving averages (scoring.md, "Worker Speed Signals"). Pure."""

__all__ = ["ALPHA", "DiskSpeed", "Ewma", "LinkSpeed"]

ALPHA = 0.3
_BATCH_BYTES_MIN = 1 << 20


class Ewma:
    """An exponentially weighted moving average; None until its first sample, which it then equals."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        """Takes one sample in."""
        self.value = sample if self.value is None else ALPHA * sample + (1 - ALPHA) * self.value


class LinkSpeed:
    """Speed of uploads, or of downloads, in Mbit/s (10^6 bits).

    A sample is a whole batch that succeeded: the caller leaves failed ones out. Batches under 1 MiB stay
    out here, for setting up the connection would be most of what they measure.
    """

    __slots__ = ("_average",)

    def __init__(self) -> None:
        self._average = Ewma()

    def add(self, nar_bytes: int, transfer_secs: float) -> None:
        """Takes in a batch: bytes of NAR, and seconds from the first grant or request to its end."""
        if nar_bytes >= _BATCH_BYTES_MIN and transfer_secs > 0:
            self._average.add(nar_bytes * 8 / transfer_secs / 1e6)

    @property
    def mbps(self) -> float | None:
        """Mbit/s, None while nothing was measured."""
        return self._average.value


class DiskSpeed:
    """What builds read and write, in MiB a second of build time."""

    __slots__ = ("_average",)

    def __init__(self) -> None:
        self._average = Ewma()

    def add(self, read_bytes: int, write_bytes: int, build_secs: float) -> None:
        """Takes in one build."""
        if build_secs > 0:
            self._average.add((read_bytes + write_bytes) / (1 << 20) / build_secs)

    @property
    def mib_per_sec(self) -> float | None:
        """MiB/s, None while nothing was measured."""
        return self._average.value
