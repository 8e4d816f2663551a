"""The check of docstrings' first words: it finds them wherever a docstring is, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from tests.helpers.scripts import script_module


@pytest.fixture
def check() -> ModuleType:
    return script_module("docstrings")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""What it holds."""', [(1, "What")]),
        ('class A:\n    """Whether it is open."""', [(2, "Whether")]),
        ('def f():\n    """\n    Of each row."""', [(2, "Of")]),
        ('class A:\n    async def f(self):\n        """As `g`."""', [(3, "As")]),
        ('def f():\n    def g():\n        r"""How."""', [(3, "How")]),
    ],
)
def test_first_words_are_found(check: ModuleType, source: str, found: list[object]) -> None:
    assert list(check.findings(source)) == found


@pytest.mark.parametrize(
    "source",
    [
        '"""True if it is open, whatever was said."""',
        '"""Whatever."""',
        'def f():\n    """Return what is left."""',
        'def f():\n    x = "What"',
        "# What it is",
    ],
)
def test_others_pass(check: ModuleType, source: str) -> None:
    assert list(check.findings(source)) == []


def test_each_is_named(
    check: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "api"
    package.mkdir()
    (package / "done.py").write_text('"""The files."""\n')
    (package / "left.py").write_text('"""What is left."""\n')
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert check.main() == 1
    assert "api/left.py:1: begins with 'What'\n" in capsys.readouterr().err


def test_the_product_has_none(check: ModuleType) -> None:
    assert check.main() == 0
