"""C libraries: compiled once for a machine, kept, shared and removed; no error where that fails."""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slipstream_ipc.native import compiler
from slipstream_ipc.native.compiler import CLibrary, compiled

_SOURCE = "int answer(void) { return 42; }\n"
can_compile = pytest.mark.skipif(
    all(shutil.which(each) is None for each in compiler._COMPILERS),
    reason="there is no C compiler",
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tried.c"
    path.write_text(_SOURCE)
    return path


def library(source: Path, *headers: Path) -> CLibrary:
    return CLibrary("tried", (source,), headers)


def answer(path: Path | None) -> int:
    assert path is not None
    found: int = ctypes.CDLL(str(path)).answer()
    return found


def files(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("cache/slipstream/native/*"))


@can_compile
def test_a_library_is_compiled_and_called(source: Path) -> None:
    assert answer(compiled(library(source))) == 42


def test_without_a_compiler_there_is_none(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_COMPILERS", ("no-such-compiler",))
    assert compiled(library(source)) is None


@can_compile
def test_a_source_that_does_not_compile_is_done_without(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("this is no C")
    assert compiled(library(source)) is None
    assert "tried" in caplog.text


@can_compile
def test_clones_share_what_is_compiled(source: Path, tmp_path: Path) -> None:
    header = tmp_path / "by_name.h"
    header.write_text("#define ANSWER 42\n")
    source.write_text('#include "by_name.h"\n' + _SOURCE.replace("42", "ANSWER"))
    made = compiled(library(source, header))
    assert (answer(made), [made]) == (42, files(tmp_path))
    clone = tmp_path / "clone"
    clone.mkdir()
    copies = [Path(shutil.copy(each, clone)) for each in (source, header)]
    assert compiled(library(*copies)) == made
    copies[1].write_text("#define ANSWER 43\n")
    assert answer(compiled(library(*copies))) == 43
    assert len(files(tmp_path)) == 2


@can_compile
def test_those_that_need_it_at_once_compile_it_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = next(filter(None, map(shutil.which, compiler._COMPILERS)))
    counting = tmp_path / "counting-cc"
    runs = tmp_path / "runs"
    counting.write_text(f'#!/bin/sh\necho run >> "{runs}"\nexec "{real}" "$@"\n')
    counting.chmod(0o700)
    monkeypatch.setattr(compiler, "_COMPILERS", (str(counting),))
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(compiled, [library(source)] * 8))
    assert set(made) == set(files(tmp_path))
    assert answer(made[0]) == 42
    assert runs.read_text() == "run\n"


@can_compile
def test_what_nothing_uses_any_more_is_removed(source: Path, tmp_path: Path) -> None:
    compiled(library(source))
    [used] = files(tmp_path)
    unused = used.with_name("tried-0.so")
    shutil.copy(used, unused)
    long_ago = time.time() - (compiler.KEPT_DAYS + 1) * 86_400
    for each in (used, unused):
        os.utime(each, (long_ago, long_ago))
    compiled(library(source))
    assert files(tmp_path) == [unused, used], "nothing was compiled"
    assert used.stat().st_mtime > long_ago
    source.write_text(_SOURCE.replace("42", "43"))
    compiled(library(source))
    assert len(files(tmp_path)) == 2
    assert used.exists()
    assert not unused.exists()
