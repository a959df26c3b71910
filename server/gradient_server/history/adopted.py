"""The memory of builds that a worker goes on with after a restart of the server.

Their predictions were made by a process that is gone, so they are made again (scoring.md: every assigned
job counts in `ram_reserved_mb`).
"""

import math
from collections.abc import Sequence

import sqlalchemy as sa

from gradient_server.db.queries.history import build_identities, metric_rows
from gradient_server.history.prediction import predict
from gradient_server.history.windows import DAY_SECS

__all__ = ["adopted_ram_mb"]


def adopted_ram_mb(
    connection: sa.Connection, builds: Sequence[str], *, now: float, retention_days: float
) -> dict[str, float]:
    """MiB that each shared build is counted with; those without a prediction are left out."""
    found: dict[str, float] = {}
    since = now - retention_days * DAY_SECS
    for build, (identity, is_download, own_peak_mb) in build_identities(connection, builds).items():
        past = predict(metric_rows(connection, identity, since=since), {}).peak_ram_mb
        known = [peak for peak in (past, own_peak_mb) if peak is not None and not math.isnan(peak)]
        if known:
            found[build] = float(max(known))
        elif is_download:
            found[build] = 0.0
    return found
