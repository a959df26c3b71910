"""The process that starts the builds, and the agent's side of it (docs/runner.md).

What runs inside that process (all but `client` and `journal`) uses the standard library and msgpack
alone, and of the standard library only what is small: neither `dataclasses`, `typing`, `pathlib` nor
`subprocess`, which together would cost more memory than the runner itself.
"""
