"""Compiles C sources into a library for this machine, once, and keeps it in the user's cache.

- A library is optional: without a compiler, or after any failure, the result is None with one log
  line, and its users have another way.
- The file name is a digest of the sources, the flags, the compiler and the processor, and not of
  where they lie: clones and environments share one file, machines that share a cache have one each.
- Processes that need it at once, as replicas that start together, wait for the one that compiles.
- A file that no process has loaded for KEPT_DAYS is removed when another one is compiled.
- Code is loaded only from a folder that is owned by this user and not writable by others.
- The file ends with its own digest, which the loader ignores. A damaged file is recompiled: loading
  it would kill the process (a truncated file is mapped beyond its end: SIGBUS).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream_ipc.atomic_file import write_atomically
from slipstream_ipc.cache_folder import user_cache

logger = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
_COMPILERS = ("gcc", "cc")
_TIMEOUT_S = 600.0  # of a compiler that hangs: our largest library takes 25 s of a processor
KEPT_DAYS = 30
_DAY_S = 86_400.0


@dataclass(frozen=True)
class CLibrary:
    """The sources of a library. `name` begins its file's name. headers: files of ours that they
    include by name. include_folder, abi: of the headers of others, and of what those are. instead:
    the code that runs without the library, for the log.
    """

    name: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    include_folder: Path | None = None
    abi: str = ""
    instead: str = "Python"

    @property
    def include_flags(self) -> list[str]:
        """The flags by which the compiler finds all headers."""
        folders = [each.parent for each in self.headers]
        if self.include_folder is not None:
            folders.append(self.include_folder)
        return [f"-I{folder}" for folder in dict.fromkeys(folders)]


def compiled(library: CLibrary) -> Path | None:
    """The compiled library's file, or None if it cannot be made."""
    try:
        return _compile(library)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        logger.warning(
            "the C library %s is not available, using %s instead: %s",
            library.name,
            library.instead,
            said.strip()[-500:],
        )
        return None


def _compile(library: CLibrary) -> Path | None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        logger.info(
            "no C compiler: using %s instead of the C library %s, which is slower",
            library.instead,
            library.name,
        )
        return None
    flags = (*_FLAGS, *library.flags)
    source = b"\0".join(each.read_bytes() for each in (*library.headers, *library.sources))
    recipe = "\0".join([compiler, *flags, library.abi, platform.machine(), _processor()]).encode()
    folder = _folder()
    digest = hashlib.sha256(recipe + source).hexdigest()[:32]
    target = folder / f"{library.name}-{digest}.so"
    if _is_usable(target):
        _note_use(target)
        return target
    with _turn_to_compile(folder), tempfile.TemporaryDirectory(dir=folder) as temporary:
        if _is_usable(target):  # made meanwhile
            return target
        logger.info("compiling the C library %s, once for this machine", library.name)
        made = Path(temporary, f"{library.name}.so")
        subprocess.run(
            [
                *(compiler, *flags, *library.include_flags, "-o", str(made)),
                *(*map(str, library.sources), "-lm"),
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        ctypes.PyDLL(str(made))  # a library that cannot be loaded is not kept
        content = made.read_bytes()
        write_atomically(target, content + _digest(content), mode=0o700)
    _remove_unused(folder)
    return target


def _is_usable(target: Path) -> bool:
    return _is_ours(target) and _is_whole(target.read_bytes()) and _can_be_loaded(target)


@contextlib.contextmanager
def _turn_to_compile(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles into the folder."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _note_use(target: Path) -> None:
    """Have the file's time of change say when it was used last, to a day."""
    with contextlib.suppress(OSError):  # removed, or on a file system that is read-only by now
        if time.time() - target.stat().st_mtime > _DAY_S:
            os.utime(target)


def _remove_unused(folder: Path) -> None:
    """Remove the libraries that nothing has used for KEPT_DAYS. Processes that have loaded one keep
    it.
    """
    oldest = time.time() - KEPT_DAYS * _DAY_S
    for path in folder.glob("*.so"):
        with contextlib.suppress(OSError):  # another process removes it, too
            if path.stat().st_mtime < oldest:
                path.unlink()


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _is_whole(kept: bytes) -> bool:
    size = hashlib.sha256().digest_size
    return _digest(kept[:-size]) == kept[-size:]


def _can_be_loaded(path: Path) -> bool:
    """True if the library loads; False if libraries that it depends on have changed."""
    try:
        ctypes.PyDLL(str(path))
    except OSError as error:
        logger.info("a cached C library cannot be loaded and is recompiled: %s", error)
        return False
    return True


def _folder() -> Path:
    """A folder that only this user may write: the cache, else a temporary one."""
    try:
        folder = user_cache() / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        logger.info("the cache folder cannot be used: %s", error)
    return Path(tempfile.mkdtemp(prefix="slipstream-native-"))


def _is_ours(path: Path) -> bool:
    """True if the path exists, belongs to this user and is not writable by others."""
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
