"""A program installed without its libraries says what to install."""

import sys
import types

import pytest
from gradient_protocol import entry


def missing(*_: str) -> types.ModuleType:
    raise ModuleNotFoundError("No module named 'rich'", name="rich")


@pytest.mark.parametrize("lazy", [False, True])
def test_a_missing_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lazy: bool
) -> None:
    program = types.ModuleType("a_program")
    program.main = missing  # type: ignore[attr-defined]  # a command that imports what it alone needs
    monkeypatch.setattr(entry.importlib, "import_module", (lambda _: program) if lazy else missing)
    with pytest.raises(SystemExit) as ended:
        entry.start("a_program", "gradient", "server")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "gradient: rich is missing: install gradient-pair[server]\n"


def test_a_module_of_ours_that_is_missing_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError):
        entry.start("gradient_nowhere.main", "gradient", "server")


def test_the_program_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    program = types.ModuleType("a_program")
    program.main = lambda: called.append(True)  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, "a_program", program)
    entry.start("a_program", "program", "worker")
    assert called == [True]
