"""The start of `gradient-server`, which imports nothing that may not be installed."""

from gradient_protocol.entry import start

__all__ = ["main"]


def main() -> None:
    """Runs the program."""
    start("gradient_server.cli", "gradient-server", "server")
