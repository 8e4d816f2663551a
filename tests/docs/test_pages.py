"""The pages against what there is: folders, commands, options, tests, links, sizes."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.pages import PAGES, ROOT

import slipstream
from slipstream import SamplingParams
from slipstream.cli.main import _parser
from slipstream.http.admin import metrics
from slipstream.http.endpoints import openapi

ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
PEERS = sorted(ROOT.glob("*/**/peers/README.md"))
DECISIONS = ROOT / "docs" / "decisions"
NUMBERS = {path.name[:3]: path for path in DECISIONS.glob("[0-9]*.md")}
OTHERS = ["ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "PROTOCOL.md"]
EVERY = [*PAGES, *(ROOT / name for name in OTHERS), *sorted(DECISIONS.glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in EVERY}
PACKAGES = ["ipc", "engine_core", "output_worker", "api", "benchmarks"]
# what is in these, their modules say
WHOLE = tuple(f"benchmarks/slipstream_{name}/" for name in ("bench", "lab", "verify"))


def folders_with_modules() -> set[str]:
    """Of the packages, as `package/folder/`."""
    found = {
        f"{path.parent.relative_to(ROOT).as_posix()}/"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    return {
        next((whole for whole in WHOLE if folder.startswith(whole)), folder) for folder in found
    }


def named_folders() -> list[str]:
    """In the order of ARCHITECTURE.md's table."""
    [table] = re.findall(r"^\| folder \| idea \|\n(.*?)\n\n", ARCHITECTURE, re.M | re.S)
    cells = re.findall(r"^\| (.*?) \|", str(table), re.M)
    named, package = [], ""
    for name in [name for cell in cells for name in re.findall(r"`([\w/]+/)`", cell)]:
        if (ROOT / name).is_dir():
            package = name if name.split("/")[0] in PACKAGES else ""
            named.append(name)
        else:  # within the package above it
            named.append(package + name)
    return named


def test_every_folder_has_its_line() -> None:
    assert folders_with_modules() <= set(named_folders())


def test_every_line_has_its_folder() -> None:
    named = named_folders()
    assert len(named) == len(set(named)) > 10
    assert not [name for name in named if not (ROOT / name).is_dir()]


@pytest.mark.parametrize(("name", "most_kib"), [("README.md", 8), ("ARCHITECTURE.md", 15)])
def test_first_pages_are_short(name: str, most_kib: int) -> None:
    assert len((ROOT / name).read_bytes()) <= most_kib * 1024


def test_decisions_are_numbered_one_by_one() -> None:
    assert sorted(NUMBERS) == [f"{number:03}" for number in range(1, len(NUMBERS) + 1)]
    assert len(list(DECISIONS.glob("[0-9]*.md"))) == len(NUMBERS)


def test_decisions_begin_with_a_title_and_take_a_page_at_most() -> None:
    for path in NUMBERS.values():
        text = path.read_text()
        assert text.startswith("# "), path.name
        assert len(text.splitlines()) <= 60, path.name


def test_the_list_of_decisions_has_each_by_its_title() -> None:
    listed = re.findall(
        r"^\| \[(\d{3})\]\((\S+)\) \| (.*) \|$", TEXTS["docs/decisions/README.md"], re.MULTILINE
    )
    titles = [path.read_text().partition("\n")[0] for _, path in sorted(NUMBERS.items())]
    assert [f"# {title}" for *_, title in listed] == titles
    assert all(NUMBERS[number].name == name for number, name, _ in listed)


def test_former_numbers_of_decisions_lead_to_what_is_there() -> None:
    rows = re.findall(
        r"^\| \*\*(\d\d)\*\* \| (.*) \|$", TEXTS["docs/decisions/README.md"], re.MULTILINE
    )
    assert [int(tens) for tens, _ in rows] == list(range(len(rows)))
    cells = [cell.strip() for _, row in rows for cell in row.split("|")]
    assert not {cell for cell in cells if cell} - set(NUMBERS)
    assert cells[66] == "006"  # other pages' notes call what is not supported by it


def test_decisions_that_are_named_by_number_are_there() -> None:
    """In code, scripts and pages: `decision 023` in prose, or over the end of a comment's line."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    named: dict[str, set[str]] = {}
    for name in listed.stdout.decode().split("\0"):
        if not name.endswith((".py", ".c", ".h", ".js", ".md", ".sh", ".toml", ".yaml")):
            continue
        if (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8")
            said = re.findall(r"\b[Dd]ecisions?(?:\s|#|\*|//)+\[?(\d+)\b", text)
            named |= {name: set(said)} if said else {}
    assert len(named) > 10
    assert not {
        name: numbers - set(NUMBERS) for name, numbers in named.items() if numbers - set(NUMBERS)
    }


# ---- commands and options ----------------------------------------------------------------------


def commands(
    parser: argparse.ArgumentParser, name: str = "slipstream"
) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Each command's name, and what it takes."""
    yield name, parser._actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each, sub in action.choices.items():
                sub.load()
                yield from commands(sub, f"{name} {each}")


ACTIONS = dict(commands(_parser()))
OPTIONS = {
    name: {option for action in actions for option in action.option_strings}
    for name, actions in ACTIONS.items()
}
SAID = "\n".join(path.read_text() for path in PAGES)
# a command in a block without a language, or between backticks, with all that follows it there
ASKED = [
    (name, text.replace("\\\n", " "))
    for name, page in [*TEXTS.items(), *((str(path.parent), path.read_text()) for path in PEERS)]
    for text in re.findall(r"(?:^|`)(slipstream [^`\n]*(?:\\\n[^`\n]*)*)", page, re.MULTILINE)
    if "COMMAND" not in text
]


def test_there_are_commands_to_look_at() -> None:
    assert len([text for _, text in ASKED if "--" in text]) > 20


@pytest.mark.parametrize(("page", "text"), ASKED)
def test_commands_have_the_options_that_the_pages_give_them(page: str, text: str) -> None:
    known = [name for name in OPTIONS if f"{text} ".startswith(f"{name} ")]
    command = max(known, key=len)
    if not text.split()[1].startswith("-"):
        assert command != "slipstream", page
    assert set(re.findall(r"(?<=\s)--[a-z][\w-]*", text)) <= OPTIONS[command]


# options of scripts, of curl, pip and others
FOREIGN = {"--all", "--dry-run", "--wheels", "--sections", "--out", "--help", "--set-up", "--init"}


# docs/from-vllm.md names vLLM's options too; tests/api/test_vllm_shapes.py reads it
OF_OURS_ALONE = [path for path in PAGES if path.name != "from-vllm.md"]


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in OF_OURS_ALONE])
def test_options_that_a_page_speaks_of_are_some_commands(page: str) -> None:
    spoken = set(re.findall(r"`(--[a-z][\w-]*)", TEXTS[page])) - FOREIGN
    assert spoken <= set().union(*OPTIONS.values())


def test_every_option_is_on_a_page() -> None:
    """But for those of benchmarks, which `slipstream bench NAME --help` explains."""
    missing = []
    for command, actions in sorted(ACTIONS.items()):
        for action in [] if command.startswith("slipstream bench") else actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            is_shown = names and action.help != argparse.SUPPRESS
            if is_shown and not any(re.search(rf"{name}(?![\w-])", SAID) for name in names):
                missing.append(f"{command} {names[0]}")
    assert missing == []


# ---- links and tests -----------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", EVERY, ids=TEXTS)
def test_decisions_are_called_by_their_numbers(path: Path) -> None:
    links = re.findall(
        r"\[(?:decision\s+)?(\d{1,3})\]\((?:[./]*(?:docs/)?decisions/)?(\d{3})-", path.read_text()
    )
    assert all(shown == number for shown, number in links)


@pytest.mark.parametrize("path", EVERY, ids=TEXTS)
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file) if file else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("path", EVERY, ids=TEXTS)
def test_files_that_a_page_names_are_there(path: Path) -> None:
    roots = "api|benchmarks|docs|engine_core|examples|ipc|output_worker|scripts|tests"
    named = re.findall(rf"`((?:{roots})/[\w./-]+)[`\s]", path.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


def test_tests_that_hold_the_promises_are_there() -> None:
    [promises] = re.findall(
        r"^## What survives$.*?^## ", TEXTS["docs/serving.md"], re.MULTILINE | re.DOTALL
    )
    names = re.findall(r"`(\w+)` \|$", promises, re.MULTILINE)
    assert len(names) > 10
    every = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name in names if f"def test_{name}(" not in every]


# ---- tables --------------------------------------------------------------------------------------


def test_every_http_path_is_in_the_guide() -> None:
    named = set(re.findall(r"`(/[\w./]*)", TEXTS["docs/http.md"]))
    paths = {path.partition("{")[0] for path in openapi.ENDPOINTS}
    assert not {path for path in paths if path not in named and f"{path}ID" not in named} - {
        "/v1/models/"
    }
    keyless = re.findall(r"^\| (`/.*?) \| \w+ \| no \|", TEXTS["docs/http.md"], re.MULTILINE)
    said = {path for cell in keyless for path in re.findall(r"`([^`]+)`", cell)}
    assert said == {path for path, each in openapi.ENDPOINTS.items() if not each.has_key}


def test_every_metric_is_in_the_guide_and_no_other() -> None:
    [table] = re.findall(
        r"^## Metrics$.*?(^\|.*?)\n\n", TEXTS["docs/deploying.md"], re.MULTILINE | re.DOTALL
    )
    cells = re.findall(r"^\| (`.*?) \|", str(table), re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(metrics.METRIC_NAMES)


def test_every_sampling_parameter_is_in_the_guide() -> None:
    [section] = re.findall(
        r"^## Sampling parameters$.*?^## ", TEXTS["docs/python.md"], re.MULTILINE | re.DOTALL
    )
    assert set(SamplingParams.__struct_fields__) <= set(re.findall(r"`(\w+)`", section))


def test_every_error_is_in_the_guide() -> None:
    named = set(re.findall(r"`(\w+Error)`", TEXTS["docs/python.md"]))
    assert {name for name in slipstream.__all__ if name.endswith("Error")} <= named
