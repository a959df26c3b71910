"""How much RAM each candidate needs (scoring.md, "Contexts"; policies.md, `RamNeed`).

Predicted: the predicted peak of a build, 1.1 times of it to start. Unmeasured: a build without a
prediction, at the instance's mean. Negligible: substitutions, evaluations, builds whose outputs the
worker holds, and fetches without a prediction.
"""

import numpy as np

from gradient_server.scoring.columns import Field, JobColumns, Points, filled
from gradient_server.scoring.contexts import InstanceContext
from gradient_server.scoring.weights import RAM_FIT_HEADROOM

__all__ = ["needed_to_start_mb"]

_MEMO = "needed_to_start_mb"


def needed_to_start_mb(columns: JobColumns, instance: InstanceContext) -> Points:
    """MB that must be available before the job starts; 0 for a negligible need. Once a decision."""
    known = columns.memo.get(_MEMO)
    if isinstance(known, np.ndarray | float):
        return known
    predicted = columns.predicted_peak_ram_mb * RAM_FIT_HEADROOM
    np.ceil(predicted, out=predicted)
    need, unpredicted = filled(predicted, instance.unmeasured_build_ram_mb)
    fetches = columns.flag(Field.IS_FIXED_OUTPUT)
    if np.count_nonzero(fetches):
        need = columns.without(np.flatnonzero(fetches & unpredicted), need)
    need = columns.without(columns.unbuilt, need)
    columns.memo[_MEMO] = need
    return need
