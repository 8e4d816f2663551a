"""What a file of tests reads: modules by the import graph, and the files beside them.

Imports are found by grimp. Modules that are named in a string count as imported, since processes
are started and commands looked up by their names; so do the files and folders of the repository
that a test names. A digest of all of them is the same in every clone.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from types import CodeType

import grimp
from tests.ledger.durations import ROOT
from tests.ledger.tools import TOOLS, tool_of

FOLDERS = {
    "slipstream": "api",
    "slipstream_bench": "benchmarks",
    "slipstream_core": "engine_core",
    "slipstream_ipc": "ipc",
    "slipstream_lab": "benchmarks",
    "slipstream_ray": "contrib/ray",
    "slipstream_verify": "benchmarks",
    "slipstream_worker": "output_worker",
    "tests": ".",
}
_NAME = re.compile(r"(?:slipstream\w*|tests)(?:\.\w+)+")
_PREFIX = re.compile(r"slipstream\w*(?:\.\w+)*\.")  # what an f-string completes
# sections of pyproject.toml that tests depend on
_SETTINGS = (("project",), ("tool", "pytest"))
_SETTINGS_FILE = "pyproject.toml"
_ROOT_CONFTEST = "tests.conftest"
_LEDGER = "tests.ledger"
_WRITTEN = "tests/durations.json"  # holds the digests
_FOR_ALL = (_SETTINGS_FILE, "constraints.txt")


class Inputs:
    """The inputs of files of tests in one state of the repository's files."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._files = set(_listed(root))
        self._graph = grimp.build_graph(
            *FOLDERS, exclude_type_checking_imports=True, cache_dir=None
        )
        self._modules = {
            module: path
            for module in self._graph.modules
            if (path := self._path_of(module)) is not None
        }
        self._commands = _commands(root)
        self._below: dict[str, list[str]] = {}  # by folder
        self._beside: dict[str, list[str]] = {}  # by the nearest folder with modules
        of_modules = {_folder(path) for path in self._modules.values()}
        for path in sorted(self._files):
            folders = [str(folder) for folder in PurePosixPath(path).parents][:-1]
            for folder in folders:
                self._below.setdefault(folder, []).append(path)
            nearest = next((folder for folder in folders if folder in of_modules), None)
            if nearest and not path.endswith(".py"):
                self._beside.setdefault(nearest, []).append(path)
        self._headers = [path for path in self._files if path.endswith(".h")]
        self._hashes = {path: self._hash(path) for path in self._files}
        self._read_by = cache(self._read)
        self._named_in = cache(self._named)

    def test_files(self) -> list[str]:
        """All files of tests."""
        return sorted(
            path for path in self._files if re.fullmatch(r"tests/(.+/)?test_\w+\.py", path)
        )

    def digest(self, test_file: str) -> str:
        """A digest of everything that a file of tests reads, itself included."""
        known = hashlib.sha256()
        for path in sorted(self.of(test_file)):
            known.update(f"{path} {self._hashes[path]}\n".encode())
        return known.hexdigest()[:12]

    def of(self, test_file: str) -> dict[str, int]:
        """The paths that a file of tests reads, each with its distance: 0 for itself and what
        stands beside it, 1 for what it imports, and so on.
        """
        found: dict[str, int] = {}
        conftests = [
            str(folder / "conftest.py")
            for folder in PurePosixPath(test_file).parents
            if str(folder / "conftest.py") in self._files
        ]
        for start in (test_file, *conftests):
            module = _module_of(start)
            for reached, distance in self._reached(module).items():
                for path in self._at(reached):
                    found[path] = min(distance, found.get(path, distance))
        if (tool := tool_of(test_file)) and (script := TOOLS[tool].script):
            found[script] = 0
        if any(path.endswith(".c") for path in found):
            of_c = (*self._headers, "packaging/extensions.py")
            found.update((path, 9) for path in of_c if path in self._files and path not in found)
        found.update((path, 9) for path in _FOR_ALL if path in self._files)
        return found

    def _at(self, reached: str) -> Iterator[str]:
        """The files behind the name of a module, or behind a path."""
        if reached in self._modules:
            path = self._modules[reached]
            yield path
            yield from self._beside.get(_folder(path), ())
        elif reached in self._files:
            yield reached
        else:
            yield from self._below.get(reached, ())

    def _reached(self, start: str) -> dict[str, int]:
        """Modules and paths by their distance from a module."""
        reached = {start: 0}
        ancestors: set[str] = set()  # whose names in strings do not count
        level = [start]
        while level:
            following: list[str] = []
            for module in level:
                distance = reached[module]
                if module not in self._modules:
                    continue
                for each in self._read_by(module, module not in ancestors):
                    if each not in reached or each in ancestors:
                        ancestors.discard(each)
                        reached.setdefault(each, distance + 1)
                        following.append(each)
                for package in _packages(module):
                    if package in self._modules and package not in reached:
                        ancestors.add(package)
                        reached[package] = distance + 1
                        following.append(package)
            level = following
        return reached

    def _read(self, module: str, with_names: bool) -> list[str]:
        read = sorted(self._graph.find_modules_directly_imported_by(module))
        if with_names:
            read += self._named_in(module)
        if module == _ROOT_CONFTEST:  # what measures tests is none of their inputs
            read = [each for each in read if not each.startswith(_LEDGER)]
        return read

    def _named(self, module: str) -> list[str]:
        """Modules, commands and (in tests) paths that a module's strings name."""
        is_test = module.startswith("tests.")
        found: set[str] = set()
        source = (self._root / self._modules[module]).read_bytes()
        for text in _strings(compile(source, module, "exec", dont_inherit=True)):
            if _PREFIX.fullmatch(text):
                found.update(each for each in self._modules if each.startswith(text))
            for name in _NAME.findall(text):
                found.update(self._behind(name))
            if is_test:
                if command := self._commands.get(text):
                    found.add(command)
                found.update(self._paths(text))
        return sorted(found - {module})

    def _behind(self, name: str) -> Iterator[str]:
        """The module of a name, or of what the name is a member of."""
        while name and name not in self._modules:
            name = name.rpartition(".")[0]
        if "." in name:
            yield name

    def _paths(self, text: str) -> Iterator[str]:
        """A file or folder of the repository's root, or below, that a test names."""
        path = text.rstrip("/")
        if (path in self._files and path not in _FOR_ALL) or (
            path in self._below and path != "tests"
        ):
            yield path

    def _path_of(self, module: str) -> str | None:
        stem = f"{FOLDERS[module.partition('.')[0]]}/{module.replace('.', '/')}".removeprefix("./")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in self._files:
                return path
        return None

    def _hash(self, path: str) -> str:
        content = (self._root / path).read_bytes()
        if path == _SETTINGS_FILE:
            content = _settings(content)
        return hashlib.sha256(content).hexdigest()


def _listed(root: Path) -> list[str]:
    """The files that git has or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return [
        path for path in done.stdout.split("\0") if path != _WRITTEN and (root / path).is_file()
    ]


@cache
def _folder(path: str) -> str:
    return str(PurePosixPath(path).parent)


def _module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def _packages(module: str) -> Iterable[str]:
    parts = module.split(".")
    return (".".join(parts[:num]) for num in range(1, len(parts)))


def _strings(constant: object) -> Iterator[str]:
    """All strings in compiled code."""
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, CodeType):
        for each in constant.co_consts:
            yield from _strings(each)
    elif isinstance(constant, tuple | frozenset):
        for each in constant:
            yield from _strings(each)


def _settings(content: bytes) -> bytes:
    """What of pyproject.toml tests depend on."""
    known = tomllib.loads(content.decode())
    parts: list[Mapping[str, object]] = []
    for keys in _SETTINGS:
        part = known
        for key in keys:
            part = part.get(key, {})
        parts.append(part)
    return json.dumps(parts, sort_keys=True).encode()


def _commands(root: Path) -> dict[str, str]:
    """Modules by the command, or the subcommand of another package, that starts them."""
    project = tomllib.loads((root / _SETTINGS_FILE).read_text())["project"]
    tables = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
    return {name: target.partition(":")[0] for table in tables for name, target in table.items()}
