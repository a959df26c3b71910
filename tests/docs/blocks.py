"""Pages with a part that is made from the code: the part stands between two markers."""

__all__ = ["block_of", "with_block"]


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"


def block_of(page: str, name: str) -> str:
    """What stands between the markers of this name. ValueError where they do not stand there once."""
    begin, end = _markers(name)
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page needs one line {begin.strip()!r} and one line {end.strip()!r}")
    return page.partition(begin)[2].partition(end)[0]


def with_block(page: str, name: str, block: str) -> str:
    """The page with `block` between the markers of this name."""
    begin, end = _markers(name)
    return page.replace(f"{begin}{block_of(page, name)}{end}", f"{begin}{block}{end}")
