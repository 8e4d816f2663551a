"""`packaging/extensions.py`: modules in a clone are compiled once, anew where C has changed, and
what is missing to compile them is named in one sentence.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = "from slipstream_ipc._native import read_messages as f; print(f.__doc__)"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The ground floor's C alone."""
    (tmp_path / "packaging").mkdir()
    text = (ROOT / "packaging" / "extensions.py").read_text()
    ours, rest = text.split("PACKAGES = {", 1)
    rest = rest.partition("}")[2]
    program = f'{ours}PACKAGES = {{"slipstream_ipc": "ipc/slipstream_ipc"}}{rest}'
    (tmp_path / "packaging" / "extensions.py").write_text(program)
    files = [*(ROOT / "ipc").rglob("*.[ch]"), ROOT / "ipc" / "slipstream_ipc" / "__init__.py"]
    for file in files:
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return tmp_path


def run(clone: Path, program: str = PROGRAM, **variables: str) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": str(clone / "ipc"), **variables}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout.strip(), done.stderr


def module(clone: Path) -> Path:
    [found] = (clone / "ipc" / "slipstream_ipc").glob("_native*.so")
    return found


def test_it_is_compiled_once_and_where_c_or_a_header_has_changed(clone: Path) -> None:
    assert run(clone) == (0, "Read messages.", "")
    made = module(clone).stat()
    assert run(clone) == (0, "Read messages.", "")
    assert module(clone).stat().st_ino == made.st_ino
    for name in ("transport/local_io.c", "history/token_pages.h"):
        (clone / "ipc" / "slipstream_ipc" / name).touch()
        assert run(clone) == (0, "Read messages.", "")
        assert module(clone).stat().st_mtime_ns > made.st_mtime_ns
        made = module(clone).stat()


def test_sources_of_any_age_are_compiled_once(clone: Path) -> None:
    """A clock that is ahead wrote one of them, and a copy that keeps times brings an older one."""
    source = clone / "ipc" / "slipstream_ipc" / "transport" / "local_io.c"
    os.utime(source, ns=(2**62, 2**62))
    assert run(clone) == (0, "Read messages.", "")
    made = module(clone).stat().st_ino
    assert run(clone) == (0, "Read messages.", "")
    assert module(clone).stat().st_ino == made
    os.utime(source, (1, 1))
    assert run(clone) == (0, "Read messages.", "")
    assert module(clone).stat().st_ino != made


def test_a_damaged_module_is_compiled_anew(clone: Path) -> None:
    """A machine that stops, and a disk that is full, leave files without their end."""
    run(clone)
    os.truncate(module(clone), 4096)
    assert run(clone) == (0, "Read messages.", "")
    [noted] = module(clone).parent.glob("*.inputs")
    for end in (0, noted.stat().st_size // 2):
        made = module(clone).stat().st_ino
        os.truncate(noted, end)
        assert run(clone) == (0, "Read messages.", "")
        assert module(clone).stat().st_ino != made


def test_what_a_killed_compilation_leaves_goes_with_the_next(clone: Path) -> None:
    compiler, folder = clone / "compiler", clone / "ipc" / "slipstream_ipc"
    compiler.write_text("#!/bin/sh\nkill -9 $PPID\n")
    compiler.chmod(0o755)
    before = set(folder.iterdir())
    assert run(clone, CC=str(compiler))[0] == -9
    assert run(clone) == (0, "Read messages.", "")
    left = {each.name for each in set(folder.iterdir()) - before} - {"__pycache__"}
    assert left == {module(clone).name, f"{module(clone).name}.inputs"}


def test_a_folder_that_cannot_be_written_is_named_in_a_sentence(clone: Path) -> None:
    refused = """
import os

def refuse(*_: object, **__: object) -> None:
    raise OSError(30, "Read-only file system", "there")

os.mkdir = os.unlink = os.replace = refuse
"""
    code, out, said = run(clone, refused + PROGRAM)
    assert (code, out) == (1, "")
    where = "Slipstream's C modules have to be compiled here"
    folder = clone / "ipc" / "slipstream_ipc"
    assert said == f"{where}, and {folder} cannot be written: Read-only file system\n"
    run(clone)
    assert run(clone, refused + PROGRAM) == (0, "Read messages.", "")


def test_programs_that_start_at_once_compile_once(clone: Path) -> None:
    compiler, log = clone / "compiler", clone / "log"
    compiler.write_text(f'#!/bin/sh\necho compiled >>{log}\nexec cc "$@"\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(clone / "ipc"), "CC": str(compiler)}
    command = [sys.executable, "-c", PROGRAM]
    started = [subprocess.Popen(command, env=environment) for _ in range(4)]
    assert [each.wait() for each in started] == 4 * [0]
    assert log.read_text() == "compiled\n"


def test_what_fails_to_compile_leaves_nothing(clone: Path) -> None:
    source = clone / "ipc" / "slipstream_ipc" / "transport" / "local_io.c"
    source.write_text(source.read_text() + "\nno C\n")
    code, _, said = run(clone)
    assert code == 1
    assert said.startswith("the C module of slipstream_ipc failed to compile:\n")
    assert "local_io.c" in said
    assert {each.name for each in source.parents[1].iterdir()} >= {"_native.c"}
    assert not list(source.parents[1].glob("*.so"))


@pytest.mark.parametrize("without", ["compiler", "headers"])
def test_what_is_missing_is_named_in_a_sentence(clone: Path, without: str) -> None:
    if without == "compiler":
        program, lacks = PROGRAM, "there is no C compiler"
    else:
        hidden = "import sysconfig; sysconfig.get_path = lambda _name: '/nowhere'; "
        program, lacks = hidden + PROGRAM, "the headers of Python are missing"
    path = "/nowhere" if without == "compiler" else os.environ["PATH"]
    where = "Slipstream's C modules have to be compiled here"
    how = "on Debian and Ubuntu: apt-get install gcc python3-dev"
    assert run(clone, program, PATH=path) == (1, "", f"{where}, and {lacks}; {how}\n")
