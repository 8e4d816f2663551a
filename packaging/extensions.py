"""Compiles each package's C into its one module, `_native`: for wheels, and in place in a clone.

- A build calls `compile_module`. In a clone `import slipstream_ipc` calls `compile_changed`, so
  that C is never older than the Python around it; so does this file as a program.
- The processor is the baseline that every wheel of its platform has: x86-64-v2, or aarch64.
- The environment variables CC, CFLAGS and LDFLAGS mean what they mean to other builds.
- Each process of a clone asks whether anything has changed, so what only a compilation needs is
  imported there. Beside a module lie its size and the sizes and times of what it was made of:
  any other is a change, also an older one, and clocks do not matter.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

PACKAGES = {
    "slipstream": "api/slipstream",
    "slipstream_core": "engine_core/slipstream_core",
    "slipstream_ipc": "ipc/slipstream_ipc",
    "slipstream_worker": "output_worker/slipstream_worker",
}
"""The folders of packages with a C module, in a clone and in sdists."""

FILE = f"_native{EXTENSION_SUFFIXES[0]}"
"""The name of a module's file, in its package's folder."""

_MADE_OF = f"{FILE}.inputs"
_NOT_OF_MODULES = ("kernels", "sharding")  # compiled where they run, for its processor
_BASELINE = {
    # x86-64-v2, as compilers before GCC 11 know it
    "x86_64": ("-msse4.2", "-mpopcnt", "-mcx16", "-msahf"),
    "aarch64": ("-march=armv8-a",),
}
_FLAGS = (
    *("-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-DNDEBUG", "-s"),  # no paths: the same bytes wherever it is compiled
    "-ffp-contract=off",  # the same floats on every processor
)
_COMPILERS = ("gcc", "cc", "clang")
_WHERE = "Slipstream's C modules have to be compiled here"
_NEEDED = _WHERE + ", and {}; on Debian and Ubuntu: apt-get install gcc python3-dev"


class CannotCompileError(SystemExit):
    """Ends the program with one sentence: packages are imported before any code of ours that could
    report an error.
    """


def compile_module(root: Path, package: str, target: Path) -> None:
    """Compile the module of a package below `root` into the file `target`, all or nothing.

    Raises: CannotCompileError.
    """
    import platform
    import shutil
    import subprocess
    import sysconfig

    compiler = _compiler()
    folders = dict.fromkeys(each.parent for each in _headers(root))
    temporary = target.with_suffix(".build")  # of one name: what was killed in it goes here, too
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        made = temporary / target.name
        command = [
            *(*compiler, *_FLAGS, *_BASELINE.get(platform.machine(), ())),
            *(f"-I{folder}" for folder in (*folders, sysconfig.get_path("include"))),
            *shlex.split(os.environ.get("CFLAGS", "")),
            *("-o", str(made), *map(str, _sources(root, package))),
            *shlex.split(os.environ.get("LDFLAGS", "")),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CannotCompileError(f"the C module of {package} failed to compile:\n{done.stderr}")
        made.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def add_to_wheel(
    root: Path, packages: Sequence[str], folder: Path, build_data: dict[str, Any]
) -> None:
    """Compile the modules of packages into an empty folder, from which hatchling takes them.

    Raises: CannotCompileError.
    """
    build_data.update(pure_python=False, infer_tag=True)
    for package in packages:
        made = folder / package / FILE
        made.parent.mkdir()
        compile_module(root, package, made)
        build_data["force_include"][str(made)] = f"{package}/{FILE}"


def compile_changed(root: Path) -> None:
    """Compile the modules of a clone that are older than their sources, in place.

    Raises: CannotCompileError.
    """
    changed = [package for package in PACKAGES if _has_changed(root, package)]
    if not changed:
        return
    with Path(__file__).open() as lock:  # processes that start at once compile once
        fcntl.flock(lock, fcntl.LOCK_EX)
        for package in changed:
            if _has_changed(root, package):
                _compile_in_place(root, package)


def _compile_in_place(root: Path, package: str) -> None:
    folder = root / PACKAGES[package]
    inputs = [*_sources(root, package), *_headers(root), Path(__file__).absolute()]
    # before it is read: what changes from then on is another
    lines = [_state(root, os.path.relpath(each, root)) for each in inputs]
    try:
        (folder / _MADE_OF).unlink(missing_ok=True)
        compile_module(root, package, folder / FILE)
        lines = [_state(root, os.path.relpath(folder / FILE, root)), *lines, ""]
        (folder / _MADE_OF).write_text("\n".join(lines))
    except OSError as error:
        said = f"{folder} cannot be written: {error.strerror}"
        raise CannotCompileError(f"{_WHERE}, and {said}") from None


def _has_changed(root: Path, package: str) -> bool:
    try:
        with open(os.path.join(root, PACKAGES[package], _MADE_OF)) as file:
            *lines, end = file.read().split("\n")
        whole = bool(lines) and not end
        return not whole or any(_state(root, each.split(" ", 2)[2]) != each for each in lines)
    except (OSError, IndexError):
        return True


def _state(root: Path, path: str) -> str:
    found = os.stat(os.path.join(root, path))
    return f"{found.st_size} {found.st_mtime_ns} {path}"


def _sources(root: Path, package: str) -> list[Path]:
    """The C files of a package's module."""
    folder = root / PACKAGES[package]
    found = sorted(folder.rglob("*.c"))
    return [each for each in found if each.relative_to(folder).parts[0] not in _NOT_OF_MODULES]


def _headers(root: Path) -> list[Path]:
    """The headers of all packages: layouts that modules share are in them."""
    folders = (root / folder for folder in PACKAGES.values())
    return [header for folder in folders for header in sorted(folder.rglob("*.h"))]


def _compiler() -> list[str]:
    import shutil
    import sysconfig

    given = shlex.split(os.environ.get("CC", ""))
    found = given or [each for each in _COMPILERS if shutil.which(each)][:1]
    if not found or shutil.which(found[0]) is None:
        raise CannotCompileError(_NEEDED.format("there is no C compiler"))
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise CannotCompileError(_NEEDED.format("the headers of Python are missing"))
    return found


if __name__ == "__main__":
    compile_changed(Path(__file__).parents[1])
