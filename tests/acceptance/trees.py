"""Source trees with a `gradient.toml`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Build", "write_tree"]


@dataclass(frozen=True, slots=True)
class Build:
    """One `[[build]]`, by default a shell script."""

    name: str
    script: str = "echo done > $out"
    inputs: Sequence[str] = ()
    more: Mapping[str, object] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The entry in `gradient.toml`; JSON texts and lists of texts are TOML."""
        entry = {
            "name": self.name,
            "command": ["/bin/sh", "-ec", self.script],
            "inputs": list(self.inputs),
            **self.more,
        }
        return ["[[build]]", *(f"{key} = {json.dumps(value)}" for key, value in entry.items())]


def write_tree(directory: Path, *builds: Build, top: str = "") -> Path:
    """A source tree with these builds; `top` comes before them in its `gradient.toml`."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [top, *(line for build in builds for line in build.lines())]
    (directory / "gradient.toml").write_text("\n".join(lines) + "\n")
    return directory
