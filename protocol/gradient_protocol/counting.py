"""Numbers of things in lines for people."""

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """`1 build`, `0 builds`, `2 builds`. `noun` is one of them, and takes an s for several."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
