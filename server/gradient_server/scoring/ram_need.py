"""How much RAM each candidate needs (scoring.md, "Contexts"; policies.md, `RamNeed`).

Predicted: the predicted peak of a build, 1.1 times of it to start. Unmeasured: a build without a
prediction, at the instance's mean. Negligible: substitutions, evaluations, builds whose outputs the
worker holds, and fetches without a prediction.
"""

import numpy as np

from gradient_server.scoring.columns import Field, Flags, JobColumns, Vector
from gradient_server.scoring.contexts import InstanceContext
from gradient_server.scoring.weights import RAM_FIT_HEADROOM

__all__ = ["needed_to_start_mb", "negligible_ram"]


def negligible_ram(columns: JobColumns) -> Flags:
    """Candidates that need no RAM worth reserving."""
    unpredicted_fetch = columns.flag(Field.IS_FIXED_OUTPUT) & np.isnan(columns.predicted_peak_ram_mb)
    substitution = ~np.isnan(columns.field(Field.SUBSTITUTE_OUTPUTS))
    flags: Flags = ~columns.is_build | columns.outputs_present | substitution | unpredicted_fetch
    return flags


def needed_to_start_mb(columns: JobColumns, instance: InstanceContext) -> Vector:
    """MB that must be available before the job starts; 0 for a negligible need."""
    predicted = np.ceil(columns.predicted_peak_ram_mb * RAM_FIT_HEADROOM)
    need = np.where(np.isnan(predicted), instance.unmeasured_build_ram_mb, predicted)
    return np.where(negligible_ram(columns), 0.0, need)
