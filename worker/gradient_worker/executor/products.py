"""Build products: files of an output that are worth naming to people.

An output that is a directory may hold `products.toml`::

    [[product]]
    type = "report"             # any word
    path = "share/index.html"   # below the output
    name = "Coverage"           # by default the file's name

A product that is not there, or that points outside its output, is left out; a file that cannot be read
as TOML names no products. Neither fails the build, which did its work.
"""

import tomllib
from pathlib import Path
from typing import Final

import structlog
from gradient_protocol.messages.shapes import BuildProduct

__all__ = ["PRODUCTS_FILE", "find_products"]

PRODUCTS_FILE: Final = "products.toml"
MAX_PRODUCTS: Final = 1000
MAX_PRODUCTS_FILE_BYTES: Final = 1024 * 1024

logger = structlog.get_logger(__name__)


def find_products(output: str, root: Path) -> list[BuildProduct]:
    """The products that an output names. Reads files: run it in a thread."""
    file = root / PRODUCTS_FILE
    try:
        if root.is_symlink() or file.is_symlink() or not file.is_file():
            return []
        if file.stat().st_size > MAX_PRODUCTS_FILE_BYTES:
            raise ValueError(f"larger than {MAX_PRODUCTS_FILE_BYTES} bytes")
        entries = tomllib.loads(file.read_text(encoding="utf-8")).get("product", [])
        if not isinstance(entries, list):
            raise TypeError("`product` must be a list of tables: [[product]]")
    except (OSError, ValueError, TypeError) as error:
        logger.warning("no build products", file=str(file), error=str(error))
        return []
    found = (_product(output, root, entry) for entry in entries[:MAX_PRODUCTS])
    return [product for product in found if product is not None]


def _product(output: str, root: Path, entry: object) -> BuildProduct | None:
    if not isinstance(entry, dict):
        return None
    path, kind = entry.get("path"), entry.get("type", "file")
    if not isinstance(path, str) or not isinstance(kind, str):
        return None
    target = root / path
    try:
        if not target.resolve().is_relative_to(root.resolve()) or not target.exists():
            logger.warning("build product left out", output=output, path=path)
            return None
        size = target.stat().st_size if target.is_file() else None
    except (OSError, ValueError) as error:
        logger.warning("build product left out", output=output, path=path, error=str(error))
        return None
    name = entry.get("name")
    return BuildProduct(
        output=output, path=path, type=kind, name=name if isinstance(name, str) else target.name, size=size
    )
