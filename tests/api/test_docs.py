"""ARCHITECTURE.md's modules and README.md's options against what there is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.cli import _parser

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
README = (ROOT / "README.md").read_text()
PEERS = (ROOT / "scripts" / "peers" / "README.md").read_text()
PACKAGES = [
    "ipc/slipstream_ipc",
    "engine_core/slipstream_core",
    "output_worker/slipstream_worker",
    "api/slipstream",
]
# folders of which ARCHITECTURE.md says what they are for; what is in them, their modules say
WHOLE = ["bench", "demo", "tracing"]


def modules(package: str) -> Iterator[str]:
    """As `folder/module`."""
    for path in (ROOT / package).rglob("*.py"):
        module = path.relative_to(ROOT / package).with_suffix("")
        if path.stem not in ("__init__", "__main__") and module.parts[0] not in WHOLE:
            yield str(module)


def section(package: str) -> str:
    [found] = re.findall(rf"^`{package}/`.*?(?=^`\w+/|^## )", ARCHITECTURE, re.M | re.S)
    return str(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_named_where_it_belongs(package: str) -> None:
    names = {name.rsplit("/", 1)[-1] for name in re.findall(r"`([\w/]+)`", section(package))}
    unnamed = [module for module in modules(package) if module.rsplit("/", 1)[-1] not in names]
    assert not unnamed


@pytest.mark.parametrize("package", PACKAGES)
def test_what_the_tables_name_is_there(package: str) -> None:
    folders = {str(path.name) for path in (ROOT / package).rglob("*") if path.is_dir()}
    there = {module.rsplit("/", 1)[-1] for module in modules(package)} | folders
    cells = re.findall(r"^\| (`.*?) \|", section(package), re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([\w/]+)`", cell)}
    assert named
    assert not [name for name in named if name.rstrip("/").rsplit("/", 1)[-1] not in there]


def commands(
    parser: argparse.ArgumentParser, name: str = "slipstream"
) -> Iterator[tuple[str, set[str]]]:
    """Each command's name, and its options."""
    yield name, {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each, sub in action.choices.items():
                sub.load()
                yield from commands(sub, f"{name} {each}")


OPTIONS = dict(commands(_parser()))
# a command in a block without a language, or between backticks, with all that follows it there
ASKED = [
    text.replace("\\\n", " ")
    for page in (README, PEERS)
    for text in re.findall(r"(?:^|`)(slipstream [^`\n]*(?:\\\n[^`\n]*)*)", page, re.MULTILINE)
    if "--" in text and "COMMAND" not in text
]


def test_there_are_commands_to_look_at() -> None:
    assert len(ASKED) > 10


@pytest.mark.parametrize("text", ASKED)
def test_commands_have_the_options_that_the_pages_give_them(text: str) -> None:
    command = max((name for name in OPTIONS if text.startswith(name)), key=len)
    assert command != "slipstream"
    assert set(re.findall(r"--[a-z][\w-]*", text)) <= OPTIONS[command]


def test_options_that_the_readme_speaks_of_are_some_commands() -> None:
    """But for those of scripts, and of curl."""
    spoken = set(re.findall(r"`(--[a-z][\w-]*)", README))
    assert spoken
    assert spoken <= set().union(*OPTIONS.values())


def test_tests_that_the_readme_names_are_there() -> None:
    [promises] = re.findall(r"^## What survives$.*?^## ", README, re.MULTILINE | re.DOTALL)
    names = re.findall(r"`(\w+)` \|$", promises, re.MULTILINE)
    assert len(names) > 10
    every = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name in names if f"def test_{name}(" not in every]
