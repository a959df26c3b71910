"""The assignment problem, by SciPy: loading it is a fifth of a server's start, which no worker waits for.

`load` is called in a thread once the server serves; whoever matches before that loads it then.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["load", "match"]

Columns = npt.NDArray[np.intp]


def load() -> None:
    """Makes the first `match` as quick as every other."""
    import scipy.optimize  # noqa: F401, PLC0415 - see above


def match(
    matrix: npt.NDArray[np.bool_] | npt.NDArray[np.float64], *, maximize: bool = False
) -> tuple[Columns, Columns]:
    """Rows and their columns at the lowest sum (the highest: `maximize`). ValueError where there is none."""
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 - see above

    rows, columns = linear_sum_assignment(matrix, maximize=maximize)
    return rows, columns
