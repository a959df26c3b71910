"""Swapping names, where the kernel can and where it cannot."""

import ctypes
from pathlib import Path

import pytest
from gradient_worker.stores.exchange import exchange


@pytest.mark.parametrize("kernel_can", [True, False])
def test_two_directories_change_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_can: bool
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    if not kernel_can:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    exchange(tmp_path / "first", tmp_path / "second")
    assert [path.name for path in (tmp_path / "first").iterdir()] == ["second"]
    assert [path.name for path in (tmp_path / "second").iterdir()] == ["first"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_name_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "first", tmp_path / "second")
