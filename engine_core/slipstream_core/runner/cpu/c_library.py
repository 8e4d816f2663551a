"""Compiles the C sources into a library for this machine, once, and keeps it in the user's cache.

- The library is optional: without a compiler, or after any failure, the result is None with one log
  line, and torch's operators are used.
- The file name is a digest of the sources, the flags, the compiler and the processor, so a cache
  shared between machines holds one file for each.
- Code is loaded only from a folder that is owned by this user and not writable by others.
- The file ends with its own digest, which the loader ignores. A damaged file is recompiled: loading
  it would kill the process (a truncated file is mapped beyond its end: SIGBUS).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from slipstream_ipc.atomic_file import write_atomically

logger = logging.getLogger(__name__)

_HEADERS = tuple(map(Path(__file__).with_name, ("kernels.h", "team.h", "vectors.h")))
_SOURCES = tuple(map(Path(__file__).with_name, ("kernels.c", "products.c", "program.c", "team.c")))
_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-pthread",
    "-shared",
    "-fPIC",
)
_COMPILERS = ("gcc", "cc")
_TIMEOUT_S = 60.0


@functools.cache
def library() -> Path | None:
    """The compiled library, or None if it cannot be built; tried once per process."""
    try:
        return _build()
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        logger.warning(
            "the C kernels are not available, using torch instead: %s", said.strip()[-500:]
        )
        return None


def _build() -> Path | None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        logger.info("no C compiler: using torch instead of the C kernels, which is slower")
        return None
    source = b"\0".join(each.read_bytes() for each in (*_HEADERS, *_SOURCES))
    recipe = "\0".join([compiler, *_FLAGS, platform.machine(), _processor()]).encode()
    folder = _folder()
    target = folder / f"kernels-{hashlib.sha256(recipe + source).hexdigest()[:32]}.so"
    if _is_ours(target) and _is_whole(target.read_bytes()) and _can_be_loaded(target):
        return target
    logger.info("compiling the C kernels, once for this machine")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary, "kernels.so")
        subprocess.run(
            [compiler, *_FLAGS, "-o", str(made), *map(str, _SOURCES), "-lm"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        ctypes.CDLL(str(made))  # a library that cannot be loaded is not kept
        content = made.read_bytes()
    write_atomically(target, content + _digest(content), mode=0o700)
    return target


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _is_whole(kept: bytes) -> bool:
    size = hashlib.sha256().digest_size
    return _digest(kept[:-size]) == kept[-size:]


def _can_be_loaded(path: Path) -> bool:
    """Whether the library loads; not if libraries it depends on have changed."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        logger.info("the cached C kernels cannot be loaded and are recompiled: %s", error)
        return False
    return True


def _folder() -> Path:
    """A folder that only this user may write: the cache, else a temporary one."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "slipstream" / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        logger.info("the cache folder cannot be used: %s", error)
    return Path(tempfile.mkdtemp(prefix="slipstream-native-"))


def _is_ours(path: Path) -> bool:
    """Whether the path exists, belongs to this user and is not writable by others."""
    try:
        status = path.lstat()
    except OSError:
        return False
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.getuid() and not others_write and not stat.S_ISLNK(status.st_mode)


def _processor() -> str:
    """A description of the processor, as far as -march=native depends on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
