"""Counts what this repository is held to; `scripts/house` calls it.

Everything is counted in the files that git has, so a line here can be repeated by hand with
`git ls-files` and `grep`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from token import NAME, STRING
from tokenize import tokenize

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("api", "contrib", "engine_core", "ipc", "output_worker")
CODE = {".py", ".c", ".h", ".js", ".css", ".html"}
COLUMN = "min_ps"  # of a plan
FIELDS = ("cache_salt", "priority", "min_p")  # of a request


def tracked(*folders: str) -> list[Path]:
    """The files of these folders that git has."""
    command = ["git", "ls-files", "-z", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / each for each in listed.decode().split("\0") if each and (ROOT / each).is_file()]


def source(*folders: str) -> list[Path]:
    """Code of these folders, without what others wrote."""
    return [
        each for each in tracked(*folders) if each.suffix in CODE and "vendor" not in each.parts
    ]


def num_lines(files: Iterable[Path]) -> int:
    """Lines of text."""
    return sum(each.read_bytes().count(b"\n") for each in files)


def in_wheels() -> int:
    """Lines of code in the wheels of slipstream and slipstream-client, which share a package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return num_lines(source(*packages, "ipc/slipstream_ipc"))


def that_say(word: str, *folders: str) -> int:
    """Files of code with a word in them."""
    found = re.compile(rf"\b{word}\b".encode())
    return sum(found.search(each.read_bytes()) is not None for each in source(*folders))


def that_use(field: str) -> int:
    """Files of the product whose code has a request's field, as a name or as a string of its own:
    comments, docstrings and texts for users may speak of it.
    """
    return sum(_uses(field, each) for each in source(*PRODUCT))


def _uses(field: str, file: Path) -> bool:
    content = file.read_bytes()
    if field.encode() not in content:
        return False
    if file.suffix != ".py":
        return re.search(rf"\b{field}\b".encode(), content) is not None
    spelled = {(NAME, field), *[(STRING, f"{quote}{field}{quote}") for quote in "'\""]}
    return any((each.type, each.string) in spelled for each in tokenize(BytesIO(content).readline))


def extensions() -> list[str]:
    """C files that are modules of Python."""
    return [
        each.stem
        for each in tracked(*PRODUCT)
        if each.suffix == ".c" and b"PyMODINIT_FUNC" in each.read_bytes()
    ]


def constructors() -> Iterator[tuple[int, str]]:
    """The number of arguments of each constructor, and whose it is."""
    for file in source(*PRODUCT):
        if file.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.ClassDef):
                continue
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    arguments = each.args
                    num = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1
                    yield num, f"{node.name} ({file.relative_to(ROOT)})"


def rooms() -> tuple[int, int, str]:
    """Folders and modules at the root of the core, the floors of its contract, and the largest
    room's share of the lines.
    """
    core = ROOT / "engine_core" / "slipstream_core"
    names: dict[str, list[Path]] = {}
    for file in source("engine_core/slipstream_core"):
        names.setdefault(file.relative_to(core).parts[0], []).append(file)
    names = {name: files for name, files in names.items() if not name.endswith("__init__.py")}
    lines = {name: num_lines(files) for name, files in names.items()}
    largest = max(lines, key=lambda name: lines[name])
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    floors = next(
        len(each["layers"])
        for each in contracts["importlinter"]["contracts"]
        if each.get("containers") == ["slipstream_core"]
    )
    return len(names), floors, f"{largest} {100 * lines[largest] / sum(lines.values()):.0f} %"


def counted() -> list[dict[str, object]]:
    """What is counted: its name, the number, and what it is to be at most."""
    most, whose = max(constructors())
    num_rooms, floors, largest = rooms()
    decisions = sum(each.name[0].isdigit() for each in tracked("docs/decisions"))
    rows: list[tuple[str, object, object]] = [
        (f"product lines ({', '.join(PRODUCT)})", num_lines(source(*PRODUCT)), 93_000),
        ("lines in the wheels", in_wheels(), 99_000),
        (f"files that know a plan's column ({COLUMN})", that_say(COLUMN, "engine_core"), 3),
        *((f"files that know a request's field ({each})", that_use(each), 5) for each in FIELDS),
        ("C extension modules", len(extensions()), 4),
        (f"most arguments of a constructor: {whose}", most, 10),
        ("rooms of the core", num_rooms, 22),
        ("floors of the core", floors, 8),
        (f"largest room of the core: {largest}", "", "16 %"),
        ("decisions", decisions, 40),
    ]
    return [{"counted": name, "number": number, "at most": goal} for name, number, goal in rows]


def main() -> int:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="as a list of objects")
    rows = counted()
    if parser.parse_args().json:
        print(json.dumps(rows, indent=1))
        return 0
    width = max(len(str(row["counted"])) for row in rows)
    for row in rows:
        print(f"{row['counted']!s:<{width}}  {row['number']!s:>8}  at most {row['at most']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
