"""`scripts/set-up` with a stand-in for Python: what it makes, makes anew, refuses and waits for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.patience import PATIENCE_S, Patience

ROOT = Path(__file__).parents[2]
HAS_CARD = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Python as far as set-up calls it. `$FAKE` is the folder of what it says and does: `pip.log` has
# each pip install; while there is a FIFO `gate`, an install waits for it to be opened.
PYTHON = r"""#!/usr/bin/env bash
version=$(cat "$(dirname "$0")/version")
case "$*" in
  *version_info*) echo "$version" ;;
  *ensurepip*) [[ ! -e $FAKE/no-venv ]] ;;
  */packaging/extensions.py)
    if [[ -e $FAKE/no-compiler ]]; then echo "no compiler" >&2 && exit 1; fi
    ;;
  *importlib.metadata*) cat "$FAKE/damaged" ;;
  "-m venv "*)
    mkdir -p "$3/bin" "$3/lib/python$version/site-packages"
    cp "$0" "$3/bin/python"
    echo "$version" >"$3/bin/version"
    echo "#!$3/bin/python" >"$3/bin/pip"
    echo venv >>"$FAKE/pip.log"
    ;;
  "-m pip config list") cat "$FAKE/config" ;;
  "-m pip index "*) [[ ! -e $FAKE/offline ]] ;;
  "-m pip install "*)
    echo "${*:4}" >>"$FAKE/pip.log"
    echo "Collecting torch (from slipstream==0.1.0)"
    if [[ -p $FAKE/gate ]]; then cat "$FAKE/gate"; fi
    if [[ -e $FAKE/broken ]]; then echo "ERROR: No matching distribution" && exit 1; fi
    echo "Installing collected packages: torch, slipstream"
    ;;
  *) echo "unexpected: $*" >&2 && exit 9 ;;
esac
"""


class Clone:
    """A repository with set-up in it, and a Python to find in PATH."""

    def __init__(self, folder: Path) -> None:
        self.root, self.fake = folder / "clone", folder / "fake"
        (self.root / "scripts").mkdir(parents=True)
        self.fake.mkdir()
        (self.root / "packaging" / "client").mkdir(parents=True)
        projects = ("pyproject.toml", "packaging/client/pyproject.toml")
        for name in ("scripts/set-up", *projects, "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        for name in ("damaged", "config", "pip.log"):
            (self.fake / name).touch()
        self.venv = self.root / ".venv"
        self.python("3.12")

    def python(self, version: str, name: str = "python3") -> Path:
        """Make the interpreter that PATH finds, or another."""
        path = self.fake / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(PYTHON)
        path.chmod(0o755)
        (path.parent / "version").write_text(version)
        return path

    def start(self, what: str = "run", **variables: str) -> subprocess.Popen[str]:
        own = ("PYTHON", "TORCH_INDEX")
        inherited = {name: value for name, value in os.environ.items() if name not in own}
        path = f"{self.fake}:{os.environ['PATH']}"
        return subprocess.Popen(
            [self.root / "scripts" / "set-up", what],
            env={**inherited, "PATH": path, "FAKE": str(self.fake), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, what: str = "run", **variables: str) -> str:
        """What a set-up that succeeds says."""
        code, said = self.end(self.start(what, **variables))
        assert code == 0, said
        return said

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        out, errors = process.communicate(timeout=PATIENCE_S)
        assert not out
        return process.returncode, errors

    def close_gate(self) -> None:
        os.mkfifo(self.fake / "gate")

    def open_gate(self) -> None:
        gate = self.fake / "gate"
        opened = os.open(gate, os.O_WRONLY)  # once an install reads it
        gate.unlink()
        os.close(opened)

    def until_pip_runs(self) -> None:
        patience = Patience(PATIENCE_S)
        while not self.installs:
            patience.wait()

    @property
    def editable(self) -> str:
        """The end of pip's arguments, before extras."""
        return f"-e {self.root}/packaging/client -e {self.root}"

    @property
    def done(self) -> list[str]:
        return (self.fake / "pip.log").read_text().splitlines()

    @property
    def installs(self) -> list[str]:
        return [line for line in self.done if line != "venv"]

    @property
    def stamps(self) -> list[str]:
        return [path.name.split("-")[1] for path in self.venv.glob(".installed-*")]


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Clone]:
    made = Clone(tmp_path)
    # an index of one's own: torch then comes from there
    (made.fake / "config").write_text("global.index-url='https://mirror.example/simple'\n")
    return made


def test_the_first_set_up_says_what_it_does_and_the_second_nothing(clone: Clone) -> None:
    said = clone.run()
    first, *_, last = said.splitlines()
    assert first.startswith(f"set-up: making {clone.venv} with Python 3.12, once; about ")
    assert "minutes" in first
    assert last.startswith("set-up: done after ")
    assert clone.done == ["venv", clone.installs[0]]
    assert clone.installs[0].endswith(f"-c {clone.root}/constraints.txt {clone.editable}")
    assert "Collecting" in (clone.venv / "set-up.log").read_text()
    assert clone.run() == ""
    assert len(clone.installs) == 1


def test_tests_add_what_they_need_and_launch_is_content_with_that(clone: Clone) -> None:
    clone.run()
    clone.run("dev")
    assert clone.installs[1].endswith(f"{clone.editable}[dev]")
    assert clone.stamps == ["dev"]
    assert clone.run() == ""
    assert clone.done.count("venv") == 1


def test_other_requirements_are_installed_into_what_there_is(clone: Clone) -> None:
    clone.run("dev")
    with (clone.root / "constraints.txt").open("a") as file:
        file.write("another==1\n")
    assert "bringing" in clone.run()
    assert clone.done.count("venv") == 1
    assert clone.stamps == ["run"]


@pytest.mark.parametrize("version", ["3.10", "2.7"])
def test_an_old_python_is_refused_before_anything_is_made(clone: Clone, version: str) -> None:
    clone.python(version)
    code, said = clone.end(clone.start())
    assert code == 1
    assert f"python3 is Python {version}" in said
    assert "needs Python 3.11 or newer, and is tried with 3.11 to 3.13" in said
    assert "PYTHON=" in said
    assert not clone.venv.exists()
    assert not clone.done


def test_a_python_that_is_not_there_is_refused(clone: Clone) -> None:
    code, said = clone.end(clone.start(PYTHON="/nowhere/python3"))
    assert (code, clone.done) == (1, [])
    assert "/nowhere/python3 does not run" in said


def test_a_python_without_venv_is_refused_with_what_to_install(clone: Clone) -> None:
    (clone.fake / "no-venv").touch()
    code, said = clone.end(clone.start())
    assert (code, clone.done) == (1, [])
    assert "apt-get install python3.12-venv" in said


def test_without_a_compiler_nothing_is_downloaded(clone: Clone) -> None:
    (clone.fake / "no-compiler").touch()
    code, said = clone.end(clone.start())
    assert (code, clone.done) == (1, [])
    assert said == "no compiler\n"


def test_a_newer_python_is_said_to_be_untried(clone: Clone) -> None:
    clone.python("3.14")
    assert "Python 3.14 is untried" in clone.run()


def test_an_old_python3_does_not_matter_to_a_venv_of_another(clone: Clone) -> None:
    clone.run()
    clone.python("3.10")
    assert clone.run() == ""


def break_python(clone: Clone) -> None:
    (clone.venv / "bin" / "python").unlink()


def age_python(clone: Clone) -> None:
    (clone.venv / "bin" / "version").write_text("3.10")


def move(clone: Clone) -> None:
    clone.root.rename(clone.root.with_name("moved"))
    clone.root = clone.root.with_name("moved")
    clone.venv = clone.root / ".venv"


def lose_a_package(clone: Clone) -> None:
    (clone.fake / "damaged").write_text("msgspec\n")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (break_python, "its Python does not run"),
        (age_python, "it has Python 3.10"),
        (move, "it was made in another folder"),
        (lose_a_package, "msgspec is missing or damaged"),
    ],
)
def test_a_venv_that_cannot_be_used_is_made_anew(clone: Clone, damage, reason: str) -> None:
    clone.run("dev")
    damage(clone)
    left = clone.venv / "left"
    left.touch()
    said = clone.run()
    assert f"the one before goes: {reason}" in said
    assert clone.done.count("venv") == 2
    assert not left.exists()


def test_another_interpreter_can_be_named_afterwards(clone: Clone) -> None:
    clone.run()
    other = str(clone.python("3.13", "other/python"))
    said = clone.run(PYTHON=other)
    assert f"it has Python 3.12, and PYTHON is {other}" in said
    assert clone.run(PYTHON=other) == ""
    assert clone.done.count("venv") == 2


def test_a_broken_venv_of_somebody_elses_is_set_aside(clone: Clone) -> None:
    (clone.venv / "bin").mkdir(parents=True)
    (clone.venv / "precious").touch()
    assert "is set aside" in clone.run()
    [kept] = clone.root.glob(".venv.*")
    assert (kept / "precious").exists()
    assert not (clone.venv / "precious").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_half_a_venv_is_not_taken_for_all(clone: Clone, how: signal.Signals) -> None:
    clone.close_gate()
    process = clone.start()
    clone.until_pip_runs()
    os.killpg(process.pid, how)
    code, said = clone.end(process)
    if how is signal.SIGKILL:
        assert code == -how
    else:
        assert code == 130
        assert "run it again to go on" in said
    assert not clone.stamps
    (clone.fake / "gate").unlink()
    assert "the one before goes: its set-up was cut short" in clone.run()
    assert [path.name for path in clone.root.glob(".venv*")] == [".venv"]
    assert clone.done.count("venv") == 2
    assert clone.stamps == ["run"]
    assert clone.run() == ""


def test_a_pip_that_fails_costs_a_working_venv_nothing(clone: Clone) -> None:
    """Say, without a network, after a pull that wants one package more."""
    clone.run()
    (clone.fake / "broken").touch()
    code, said = clone.end(clone.start("dev"))
    assert code == 1
    assert "ERROR: No matching distribution" in said
    assert str(clone.venv / "set-up.log") in said
    assert clone.run() == ""
    (clone.fake / "broken").unlink()
    clone.run("dev")
    assert clone.done.count("venv") == 1


def test_two_at_once_install_once(clone: Clone) -> None:
    clone.close_gate()
    first = clone.start()
    clone.until_pip_runs()
    second = clone.start()
    assert second.stderr is not None
    assert "waiting for it" in second.stderr.readline()
    clone.open_gate()
    assert clone.end(first)[0] == 0
    assert clone.end(second) == (0, "")
    assert len(clone.installs) == 1


# ---- torch ---------------------------------------------------------------------------------------


@pytest.mark.skipif(HAS_CARD, reason="this machine has a card")
def test_without_a_card_torch_comes_from_the_cpu_builds(clone: Clone) -> None:
    (clone.fake / "config").write_text("global.timeout='60'\n")
    clone.run()
    torch, rest = clone.installs
    assert torch.endswith(f"--no-deps --index-url {CPU_INDEX} torch")
    assert CPU_INDEX not in rest


@pytest.mark.skipif(HAS_CARD, reason="this machine has a card")
@pytest.mark.parametrize(
    "line", ["global.extra-index-url='https://mirror.example'", ":env:.find-links='/wheels'"]
)
def test_an_index_of_ones_own_has_the_say(clone: Clone, line: str) -> None:
    (clone.fake / "config").write_text(f"{line}\n" + "global.timeout='60'\n" * 5000)
    clone.run()
    assert len(clone.installs) == 1


@pytest.mark.skipif(HAS_CARD, reason="this machine has a card")
def test_without_that_index_torch_comes_as_the_rest_does(clone: Clone) -> None:
    (clone.fake / "config").write_text("")
    (clone.fake / "offline").touch()
    assert f"{CPU_INDEX} cannot be reached" in clone.run()
    assert len(clone.installs) == 1


def test_with_a_card_torch_comes_with_cuda_and_triton(clone: Clone) -> None:
    (clone.fake / "config").write_text("")
    (clone.fake / "nvidia-smi").write_text("#!/bin/sh\n")
    (clone.fake / "nvidia-smi").chmod(0o755)
    assert "CUDA" in clone.run()
    [only] = clone.installs
    assert only.endswith(f"{clone.editable}[gpu]")
    clone.run("dev")
    assert clone.installs[1].endswith(f"{clone.editable}[dev,gpu]")


def test_the_index_of_torch_can_be_named(clone: Clone) -> None:
    clone.run(TORCH_INDEX="https://mirror.example/torch")
    assert "--index-url https://mirror.example/torch torch" in clone.installs[0]


def test_naming_no_index_takes_torch_as_the_rest(clone: Clone) -> None:
    (clone.fake / "config").write_text("")
    clone.run(TORCH_INDEX="")
    assert len(clone.installs) == 1


def installing(venv: Path, *names: str) -> str:
    """What set-up shows while pip installs these packages."""
    function = "eval \"$(sed -n '/^show_installing() {/,/^}/p' scripts/set-up)\"; venv=$1; shift; "
    done = subprocess.run(
        ["bash", "-euc", function + 'show_installing "$@"', "-", venv, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return done.stdout.strip()


def test_the_package_that_pip_is_at_is_shown_with_what_it_does(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    old = site / "pip-1.dist-info"
    old.mkdir(parents=True)
    (old / "INSTALLER").touch()
    os.utime(old / "INSTALLER", (1, 1))
    os.utime(old, (1, 1))
    begun = tmp_path / ".unfinished"
    begun.touch()
    os.utime(begun, (2, 2))
    names = ("torch", "rich", "slipstream")
    assert installing(tmp_path, *names) == "installing torch (1 of 3)"
    for number, name in enumerate(names, 1):
        made = site / f"{name}-1.dist-info"
        made.mkdir()
        doing = f"compiling the Python files of {name} ({number} of 3)"
        assert installing(tmp_path, *names) == doing
        (made / "INSTALLER").touch()
    assert installing(tmp_path, *names) == "finishing"


def test_what_pip_takes_away_meanwhile_is_not_told(tmp_path: Path) -> None:
    assert installing(tmp_path, "torch", "rich") == "installing torch (1 of 2)"
