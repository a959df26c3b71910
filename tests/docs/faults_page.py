"""Writes what faults cost into docs/faults.md: `python -m tests.docs.faults_page FILE`.

FILE is what the acceptance tests wrote where `GRADIENT_FAULTS_JSON` named it (tests/acceptance/counting.py).
"""

import json
import sys
from pathlib import Path

from tests.docs.blocks import with_block

__all__ = ["BLOCK", "PAGE", "table"]

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
BLOCK = "what faults of processes cost"


def table(lines: list[str]) -> str:
    """A row for each fault, the last measurement of it."""
    rows = {}
    for line in lines:
        entry = json.loads(line)
        rows[entry["fault"]] = (
            f"| {entry['fault']} | {entry['again']} | {entry['secs']:.1f} | `{entry['test']}` |"
        )
    return "\n".join(["| Fault | Again | Secs | Test |", "|---|---|---|---|", *rows.values()]) + "\n"


def main() -> None:
    """The command."""
    (file,) = sys.argv[1:]
    PAGE.write_text(with_block(PAGE.read_text(), BLOCK, table(Path(file).read_text().splitlines())))


if __name__ == "__main__":
    main()
