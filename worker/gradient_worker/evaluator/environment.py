"""Names of the environment variables that a build finds its inputs and outputs by (pure).

operations.md, "Recipes": `lib-a-1.0` is `LIB_A`, a further output `dev` of it `LIB_A_DEV`. One place
for the evaluator, which refuses two inputs with one variable, and for whatever runs the build.
"""

import re

__all__ = ["OUT", "SOURCE", "input_variable", "is_reserved", "package_name"]

# The output that has no suffix, in paths and in variables alike.
OUT = "out"
# The input that is the source tree itself.
SOURCE = "source"

# What a build's environment has in any case.
_RESERVED = {"HOME", "PATH", "TMPDIR"}
_RESERVED_PREFIX = "GRADIENT_"

_VERSION = re.compile(r"-(?![A-Za-z]).*", re.DOTALL)
_OTHER = re.compile(r"[^A-Za-z0-9]")


def package_name(name: str) -> str:
    """The name without its version, which starts at the first dash that no letter follows."""
    return _VERSION.sub("", name, count=1)


def input_variable(name: str, output: str | None) -> str:
    """The variable that holds the path of an input's output. None, for a source, is as `out`."""
    words = package_name(name) if output in {None, OUT} else f"{package_name(name)}_{output}"
    return _OTHER.sub("_", words).upper()


def is_reserved(variable: str) -> bool:
    """Whether an input or output must not have this variable."""
    return variable in _RESERVED or variable.startswith(_RESERVED_PREFIX)
