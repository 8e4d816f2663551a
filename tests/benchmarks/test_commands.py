"""The benchmarks are found by an entry point: in the checkout, and from a wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream.cli.options.parser import installed_commands
from slipstream_bench import commands

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "slipstream",
    "slipstream_bench",
    "slipstream_core",
    "slipstream_ipc",
    "slipstream_worker",
}


def test_the_checkout_has_the_entry_point() -> None:
    assert installed_commands()["bench"] == commands.BENCH


def test_help_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert not [name for name in commands.BENCHMARKS if f"\n    {name}" not in told]


@pytest.mark.parametrize("name", commands.FORMER)
def test_a_former_name_is_answered_with_what_is_there_now(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, "--quick"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told == f"slipstream bench {name}: {commands.FORMER[name]}\n"
    now = re.findall(r"`slipstream (bench [^`]*)`", told)
    assert len(now) == 1
    with pytest.raises(SystemExit) as ended:
        main([*now[0].split(), "--help"])
    assert ended.value.code == 0
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert f"\n    {name}" not in capsys.readouterr().out


def test_naming_no_benchmark_imports_none() -> None:
    program = (
        "import sys\n"
        "from slipstream_bench import commands\n"
        "print([name for name in sys.modules if name.startswith('slipstream_bench.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['slipstream_bench.commands']"


# ---- the wheel -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but what the two wheels hold."""
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    # hatchling's backend is called as pip would call it, without a network
    program = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
    for project in (ROOT, ROOT / "packaging" / "client"):
        subprocess.run([sys.executable, "-c", program, str(wheels)], cwd=project, check=True)
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    files = map(str, wheels.glob("*.whl"))
    subprocess.run([sys.executable, *install, "--target", str(folder), *files], check=True)
    return folder


def test_the_wheels_have_the_five_packages_alone(installed: Path) -> None:
    found = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert found - {"bin"} == PACKAGES


# Asks for the help of every command there is; prints each one's words, with a colon where it
# answers that it runs from a clone or that its distribution is missing. argv: where the wheel is
# installed, the checkout, whose packages must not be found.
_PROGRAM = """
import contextlib, io, re, sys
installed, checkout = sys.argv[1:]
sys.path = [installed, *(p for p in sys.path if not p.startswith(checkout) or ".venv" in p)]
import slipstream.cli.main

assert slipstream.cli.main.__file__.startswith(installed), slipstream.cli.main.__file__

def ask(*words):
    told, refused = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(refused):
        try:
            code = slipstream.cli.main.main([*words, "--help"])
        except SystemExit as ended:
            code = ended.code
    said = ("runs from a clone of Slipstream's repository", "slipstream-ray is missing")
    if code == 2 and any(words in refused.getvalue() for words in said):
        print("slipstream", *words, end=":\\n")
        return
    assert told.getvalue().startswith("usage: "), words
    print("slipstream", *words)
    listed = re.search(r"\\n(commands|demos|benchmarks):\\n(.*?)\\n\\n", told.getvalue(), re.DOTALL)
    for line in listed[2].splitlines() if listed else ():
        if line[:4] == 4 * " " and line[4] != " ":
            ask(*words, line.split()[0])

ask()
for name, module in sys.modules.items():
    if name.startswith("slipstream") and module.__file__ is not None:
        assert module.__file__.startswith(installed), name
"""


@pytest.mark.process
def test_every_command_of_a_wheel_has_help(installed: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM, str(installed), str(ROOT)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = set(done.stdout.splitlines())
    kept = {name for name in commands.BENCHMARKS if f"slipstream bench {name}" in told}
    assert kept == {"latency", "serve", "start", "throughput"}
    assert {f"slipstream bench {name}:" for name in commands.BENCHMARKS if name not in kept} <= told
    assert {"slipstream serve", "slipstream demo kill", "slipstream keys"} <= told
