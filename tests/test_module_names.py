"""Every dotted module name in code, scripts, settings and the two pages is a module that exists."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("api", "benchmarks", "contrib", "engine_core", "ipc", "output_worker", "scripts")
NAME = re.compile(r"(?<![\w./@-])slipstream(?:_\w+)?(?:\.[A-Za-z_]\w*)+")
# a unit's file, the group of entry points, a logger
OTHERS = {
    "slipstream.commands",
    "slipstream.duration_s",  # an attribute of spans
    "slipstream.http.access",
    "slipstream.service",
}


def texts() -> list[Path]:
    found = [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    for folder in FOLDERS:
        found += [
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and path.suffix in ("", ".py", ".md", ".service", ".toml")
        ]
    return found


def exists(name: str) -> bool:
    """A module, or what one has: a class, a function, one of its members."""
    module, rest = name, ""
    while not _is_module(module):
        module, _, last = module.rpartition(".")
        rest = f"{last}.{rest}" if rest else last
    try:
        if rest:
            attrgetter(rest)(import_module(module))
    except AttributeError:
        return False
    return True


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is none
        return False


def test_names_resolve() -> None:
    named: dict[str, list[str]] = {}
    for path in texts():
        for name in NAME.findall(path.read_text("utf-8", errors="ignore")):
            named.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert len(named) > 100
    wrong = {name: files for name, files in named.items() if not exists(name)}
    assert not {name: files for name, files in wrong.items() if name not in OTHERS}


def test_a_name_that_is_gone_is_seen() -> None:
    assert exists("slipstream.Client.stream")
    assert not exists("slipstream_core.no_such_module")
    assert not exists("slipstream.Client.no_such_method")
