"""`gradient-cluster`: what a running member of a cluster talks through (operations.md, "Recipes").

Exit 3 says that there is no attempt to talk to, which is always so where no member runs.
"""

import sys

__all__ = ["main"]

NO_ATTEMPT = 3


def main() -> None:
    """Entry point of `gradient-cluster`."""
    sys.stderr.write("gradient-cluster: no cluster attempt here; run it from the command of a member\n")
    sys.exit(NO_ATTEMPT)
