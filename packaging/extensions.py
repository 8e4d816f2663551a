"""Compiles each package's C into its one module, `_native`: for wheels, and in place in a clone.

- A build calls `compile_module`. In a clone `import slipstream_ipc` calls `compile_changed`, so
  that C is never older than the Python around it; so does this file as a program.
- The processor is the baseline that every wheel of its platform has: x86-64-v2, or aarch64.
- The environment variables CC, CFLAGS and LDFLAGS mean what they mean to other builds.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

PACKAGES = {"slipstream_ipc": "ipc/slipstream_ipc"}
"""The folders of packages with a C module, in a clone and in sdists."""

FILE = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
"""The name of a module's file, in its package's folder."""

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
_NEEDED = "Slipstream's C modules have to be compiled here, and {}; on Debian and Ubuntu: "
_NEEDED += "apt-get install gcc python3-dev"


class CannotCompileError(SystemExit):
    """Ends the program with one sentence: packages are imported before any code of ours that could
    report an error.
    """


def sources(folder: Path) -> list[Path]:
    """The C files of a package's module."""
    return [
        each for each in sorted(folder.rglob("*.c")) if not is_compiled_where_it_runs(each, folder)
    ]


def is_compiled_where_it_runs(path: Path, folder: Path) -> bool:
    """True for the C of a package that a wheel carries as source."""
    return path.relative_to(folder).parts[0] in _NOT_OF_MODULES


def compile_module(root: Path, package: str, target: Path) -> None:
    """Compile the module of a package below `root` into the file `target`, all or nothing.

    Raises: CannotCompileError.
    """
    compiler, began = _compiler(), time.time_ns()
    folders = dict.fromkeys(each.parent for each in _headers(root))
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made = Path(temporary, target.name)
        command = [
            *(*compiler, *_FLAGS, *_BASELINE.get(platform.machine(), ())),
            *(f"-I{folder}" for folder in (*folders, sysconfig.get_path("include"))),
            *shlex.split(os.environ.get("CFLAGS", "")),
            *("-o", str(made), *map(str, sources(root / PACKAGES[package]))),
            *shlex.split(os.environ.get("LDFLAGS", "")),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CannotCompileError(f"the C module of {package} failed to compile:\n{done.stderr}")
        os.utime(made, ns=(began, began))  # what changes from now on is newer
        made.replace(target)


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
                compile_module(root, package, _in_place(root, package))


def _in_place(root: Path, package: str) -> Path:
    return root / PACKAGES[package] / FILE


def _has_changed(root: Path, package: str) -> bool:
    try:
        made = _in_place(root, package).stat().st_mtime_ns
    except OSError:
        return True
    used = (*sources(root / PACKAGES[package]), *_headers(root), Path(__file__))
    return any(each.stat().st_mtime_ns >= made for each in used)


def _headers(root: Path) -> list[Path]:
    """The headers of all packages: layouts that modules share are in them."""
    folders = (root / folder for folder in PACKAGES.values())
    return [header for folder in folders for header in sorted(folder.rglob("*.h"))]


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CC", ""))
    found = given or [each for each in _COMPILERS if shutil.which(each)][:1]
    if not found or shutil.which(found[0]) is None:
        raise CannotCompileError(_NEEDED.format("there is no C compiler"))
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise CannotCompileError(_NEEDED.format("the headers of Python are missing"))
    return found


if __name__ == "__main__":
    compile_changed(Path(__file__).parents[1])
