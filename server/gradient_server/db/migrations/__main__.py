"""Writes a new revision: the difference between what the migrations make and what the tables say.

Read what it wrote before you keep it: Alembic sees neither a changed condition of an index nor a
changed CHECK. The migration test does.
"""

import sys
import tempfile
from pathlib import Path

from alembic import command
from alembic.script import Script

from gradient_server.db.engine import make_write_engine, parse_url
from gradient_server.db.migrate import alembic_config, migrate

__all__ = ["main"]

VERSIONS = Path(__file__).with_name("versions")


def main(arguments: list[str]) -> int:
    """Takes the message of the revision; returns the exit status."""
    if len(arguments) != 1:
        sys.stderr.write('usage: python -m gradient_server.db.migrations "what changes"\n')
        return 2
    revisions = [path for path in VERSIONS.glob("*.py") if path.stem[0].isdigit()]
    with tempfile.TemporaryDirectory() as directory:
        url = parse_url(f"sqlite:///{directory}/scratch.db")
        if revisions:
            migrate(url)
        engine = make_write_engine(url)
        with engine.begin() as connection:
            written = command.revision(
                alembic_config(connection),
                arguments[0],
                autogenerate=True,
                rev_id=f"{len(revisions) + 1:04}",
            )
        engine.dispose()
    if not isinstance(written, Script):
        raise TypeError("Alembic wrote something else than one revision")
    path = Path(written.path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.lstrip().startswith("# ###")))
    sys.stdout.write(f"{path}: read it, then run the migration test\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
