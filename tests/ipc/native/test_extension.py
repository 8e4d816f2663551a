"""C extensions: compiled and loaded where that is possible, done without where it is not."""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
from pathlib import Path

import pytest

from slipstream_ipc.native import compiler
from slipstream_ipc.native.extension import PURE_PYTHON, load_extension

_SOURCE = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) {
    (void)self; (void)args;
    return PyLong_FromLong(42);
}
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, "The answer."}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tried", 0, 0, methods, 0, 0, 0, 0};
PyMODINIT_FUNC PyInit_tried(void) { return PyModule_Create(&module); }
"""

can_compile = pytest.mark.skipif(
    all(shutil.which(each) is None for each in compiler._COMPILERS)
    or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="there is no C compiler, or there are no headers of Python",
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(PURE_PYTHON, raising=False)
    path = tmp_path / "tried.c"
    path.write_text(_SOURCE)
    return path


def files(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("cache/slipstream/native/*"))


@can_compile
def test_an_extension_is_compiled_and_called(source: Path) -> None:
    module = load_extension.__wrapped__("tried", source)
    assert module is not None
    assert module.answer() == 42


@can_compile
def test_pure_python_takes_none(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PURE_PYTHON, "1")
    assert load_extension.__wrapped__("tried", source) is None


def test_without_a_compiler_there_is_none(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_COMPILERS", ("no-such-compiler",))
    assert load_extension.__wrapped__("tried", source) is None


def test_without_headers_there_is_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert load_extension.__wrapped__("tried", source) is None


@can_compile
@pytest.mark.parametrize("broken", ["this is no C", _SOURCE.replace("PyInit_tried", "PyInit_it")])
def test_a_source_that_makes_no_module_is_done_without(
    source: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    source.write_text(broken)
    assert load_extension.__wrapped__("tried", source) is None
    assert "tried" in caplog.text


@can_compile
def test_clones_and_environments_share_what_is_compiled(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "by_name.h"
    header.write_text("#define ANSWER 42\n")
    source.write_text('#include "by_name.h"\n' + _SOURCE.replace("42", "ANSWER"))
    assert load_extension.__wrapped__("tried", source, (header,)).answer() == 42
    [made] = files(tmp_path)
    clone, python = tmp_path / "clone", tmp_path / "python"
    clone.mkdir()
    python.symlink_to(sysconfig.get_path("include"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(python))
    copies = [shutil.copy(each, clone) for each in (source, header)]
    again = load_extension.__wrapped__("tried", Path(copies[0]), (Path(copies[1]),))
    assert again.answer() == 42
    assert files(tmp_path) == [made]
    Path(copies[1]).write_text("#define ANSWER 43\n")
    load_extension.__wrapped__("tried", Path(copies[0]), (Path(copies[1]),))
    assert len(files(tmp_path)) == 2


@can_compile
def test_what_nothing_uses_any_more_is_removed(source: Path, tmp_path: Path) -> None:
    load_extension.__wrapped__("tried", source)
    [used] = files(tmp_path)
    unused = used.with_name("tried-0.so")
    shutil.copy(used, unused)
    long_ago = time.time() - (compiler.KEPT_DAYS + 1) * 86_400
    for each in (used, unused):
        os.utime(each, (long_ago, long_ago))
    load_extension.__wrapped__("tried", source)
    assert files(tmp_path) == [unused, used], "nothing was compiled"
    assert used.stat().st_mtime > long_ago
    source.write_text(_SOURCE.replace("42", "43"))
    load_extension.__wrapped__("tried", source)
    assert len(files(tmp_path)) == 2
    assert used.exists()
    assert not unused.exists()
