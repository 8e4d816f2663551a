"""The C sources as a library of this machine: compiled once, kept in the user's cache.

Owns the compiler's call and the file. Knows nothing of what the kernels do.

Rules:
- Nothing depends on it: no compiler, no room, a failure of any kind is one line in the log and
  None, and torch's operators serve.
- The file's name is a digest of the source, the flags, the compiler and the processor, so a cache
  that is shared between machines holds one file for each.
- Code is loaded from a folder that only its owner may write, and that is us.
- What is kept carries its own digest behind its last byte, where a loader does not look. A damaged
  file is compiled anew; to load it would be the process's end (a file that was cut is mapped beyond
  its end: SIGBUS).
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
    """The compiled kernels, or None where they cannot be had; one attempt in each process."""
    try:
        return _build()
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        logger.warning("no kernels of our own, torch's serve: %s", said.strip()[-500:])
        return None


def _build() -> Path | None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        logger.info("no C compiler, so no kernels of our own: torch's serve, which is slower")
        return None
    source = b"\0".join(each.read_bytes() for each in (*_HEADERS, *_SOURCES))
    recipe = "\0".join([compiler, *_FLAGS, platform.machine(), _processor()]).encode()
    folder = _folder()
    target = folder / f"kernels-{hashlib.sha256(recipe + source).hexdigest()[:32]}.so"
    if _is_ours(target) and _is_whole(target.read_bytes()) and _can_be_loaded(target):
        return target
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary, "kernels.so")
        subprocess.run(
            [compiler, *_FLAGS, "-o", str(made), *map(str, _SOURCES), "-lm"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        ctypes.CDLL(str(made))  # what cannot be loaded is not kept
        content = made.read_bytes()
    write_atomically(target, content + _digest(content), mode=0o700)
    return target


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _is_whole(kept: bytes) -> bool:
    size = hashlib.sha256().digest_size
    return _digest(kept[:-size]) == kept[-size:]


def _can_be_loaded(path: Path) -> bool:
    """Not so where the libraries that it needs have changed since."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        logger.info("the compiled kernels cannot be loaded, and are compiled anew: %s", error)
        return False
    return True


def _folder() -> Path:
    """A folder that nobody else may write."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "slipstream" / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        logger.info("the cache folder cannot be used: %s", error)
    return Path(tempfile.mkdtemp(prefix="slipstream-native-"))


def _is_ours(path: Path) -> bool:
    """Whether it is there, ours, and nobody else may write it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.getuid() and not others_write and not stat.S_ISLNK(status.st_mode)


def _processor() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
