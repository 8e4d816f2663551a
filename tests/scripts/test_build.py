"""What `scripts/build` makes: wheels that work outside of the repository, and their sdists."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

import pytest
from tests.helpers.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "packaging" / "client" / "pyproject.toml"
RAY = ROOT / "contrib" / "ray" / "pyproject.toml"
SOURCES = ["api/slipstream", "benchmarks/slipstream_bench", "engine_core/slipstream_core"]
SOURCES += ["ipc/slipstream_ipc", "output_worker/slipstream_worker"]
PACKAGES = ["slipstream", "slipstream_bench", "slipstream_core", "slipstream_ipc"]
PACKAGES += ["slipstream_worker"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run([ROOT / "scripts" / "build", folder], ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [wheel] = built.glob("slipstream-*.whl")
    return wheel


@pytest.fixture(scope="module")
def client_wheel(built: Path) -> Path:
    [wheel] = built.glob("slipstream_client-*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(wheel: Path, client_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with both wheels, and with what they require from the tests' own."""
    return installed(tmp_path_factory.mktemp("venv"), wheel, client_wheel)


@pytest.fixture(scope="module")
def client_environment(client_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("venv"), client_wheel)


def installed(folder: Path, *wheels: Path) -> Path:
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    python = folder / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run([python, "-c", asked], folder).strip())
    # .pth files in that path are not followed, so our own editable install is not seen
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    run([*pip, "--no-deps", "--no-index", "--no-compile", *map(str, wheels)], folder)
    return folder


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_what_remains_when_the_server_is_uninstalled_is_the_client(
    wheel: Path, client_wheel: Path, tmp_path: Path
) -> None:
    both = installed(tmp_path, wheel, client_wheel)
    python = both / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    run([*pip, "uninstall", "--quiet", "--yes", "slipstream"], tmp_path)
    program = "import slipstream; print(slipstream.Client.__module__, slipstream.__file__)"
    module, file = run([python, "-c", program], tmp_path).split()
    assert (module, file.startswith(str(both))) == ("slipstream.client.client", True)
    assert not (both / "bin" / "slipstream").exists()


@pytest.mark.parametrize(
    ("name", "folder"),
    [("slipstream", ROOT), ("slipstream_client", CLIENT.parent), ("slipstream_ray", RAY.parent)],
)
def test_the_repository_and_its_sdist_build_the_same_wheel(
    name: str, folder: Path, built: Path, tmp_path: Path
) -> None:
    [wheel] = built.glob(f"{name}-*.whl")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], folder)
    from_repository, from_sdist = contents(tmp_path / wheel.name), contents(wheel)
    assert from_sdist.keys() == from_repository.keys()
    assert from_sdist == from_repository


def packages_of(wheel: Path) -> set[str]:
    return {name for name in contents(wheel) if ".dist-info/" not in name}


def test_each_file_of_the_packages_is_in_one_wheel(wheel: Path, client_wheel: Path) -> None:
    ours, clients = packages_of(wheel), packages_of(client_wheel)
    assert not ours & clients
    tracked = run(["git", "ls-files", *SOURCES], ROOT).split()
    expected = {name.split("/", 1)[1] for name in tracked if (ROOT / name).is_file()}
    where_it_runs = ("slipstream_core/kernels/cpu/", "slipstream_core/sharding/")
    expected = {
        name for name in expected if name.startswith(where_it_runs) or name[-2:] not in (".c", ".h")
    }
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    with_c = ("slipstream", "slipstream_core", "slipstream_ipc", "slipstream_worker")
    assert ours | clients == expected | {f"{package}/_native{suffix}" for package in with_c}
    assert {name.split("/")[0] for name in clients} == {"slipstream", "slipstream_ipc"}


def test_the_distributions_have_one_version_and_the_server_asks_for_it() -> None:
    server, client, ray = (
        tomllib.loads(path.read_text()) for path in (ROOT / "pyproject.toml", CLIENT, RAY)
    )
    version = server["project"]["version"]
    assert client["project"]["version"] == ray["project"]["version"] == version
    assert f"slipstream=={version}" in ray["project"]["dependencies"]
    assert server["project"]["optional-dependencies"]["ray"] == [f"slipstream-ray=={version}"]
    assert (RAY.parent / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert f"slipstream-client=={version}" in server["project"]["dependencies"]
    theirs = client["tool"]["hatch"]["build"]["hooks"]["custom"]["sources"]["api/slipstream"]
    excluded = server["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]
    assert excluded[3:] == [f"/api/slipstream/{name}" for name in theirs]
    assert set(client["project"]["dependencies"]) < set(server["project"]["dependencies"])
    assert (CLIENT.parent / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_command_of_ray_is_in_a_wheel_of_its_own(
    environment: Path, wheel: Path, client_wheel: Path, built: Path, tmp_path: Path
) -> None:
    [ray] = built.glob("slipstream_ray-*.whl")
    tracked = run(["git", "ls-files", RAY.parent / "slipstream_ray"], ROOT).split()
    assert packages_of(ray) == {name.removeprefix("contrib/ray/") for name in tracked}
    assert not packages_of(ray) & (packages_of(wheel) | packages_of(client_wheel))
    assert not [name for name in contents(wheel) if "ray_fleet" in name or "slipstream_ray" in name]
    said = "slipstream ray: slipstream-ray is missing: pip install 'slipstream[ray]'\n"
    for words in ([], ["up", "--replicas", "2"], ["--name", "x", "status"], ["--help"]):
        command = [environment / "bin" / "python", "-m", "slipstream", "ray", *words]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    with_ray = installed(tmp_path, wheel, *built.glob("slipstream_[cr]*.whl"))
    found = run([with_ray / "bin" / "python", "-m", "slipstream", "ray", "--help"], tmp_path)
    assert "start replicas of a model" in found


def test_the_client_alone_has_its_names_and_says_where_the_others_are(
    client_environment: Path, tmp_path: Path
) -> None:
    python = client_environment / "bin" / "python"
    program = """
import slipstream
has = []
for name in slipstream.__all__:
    try:
        getattr(slipstream, name)
        has.append(name)
    except ImportError as error:
        assert str(error) == (
            f"slipstream.{name} is not in slipstream-client, which is installed here: "
            "pip install slipstream"
        ), error
print(slipstream.__file__, *sorted(set(slipstream.__all__) - {*has}))
"""
    file, *lacks = run([python, "-c", program], tmp_path).split()
    assert file.startswith(str(client_environment))
    assert lacks == ["LLM", "Stack", "StackError"]


# An interpreter whose pip notes what it is asked for, and installs nothing.
NOTING = """#!/bin/sh
if [ "$2" = venv ]; then
  mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
elif [ "$2" = pip ]; then
  echo "$@" >> {asked}
else
  exec {python} "$@"
fi
"""


def test_a_fresh_clone_needs_nothing_but_hatchling(tmp_path: Path) -> None:
    clone, asked, python = tmp_path / "clone", tmp_path / "asked", tmp_path / "python"
    tracked = run(["git", "ls-files", "-z"], ROOT).split("\0")
    for name in tracked:
        if name and (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    python.write_text(NOTING.format(asked=asked, python=sys.executable))
    python.chmod(0o755)
    run([clone / "scripts" / "build"], tmp_path, PYTHON=str(python))
    assert len(list((clone / "dist").iterdir())) == 6
    assert not (clone / ".venv").exists()
    [command] = asked.read_text().splitlines()
    assert command.startswith("-m pip install ")
    assert command.endswith(f" -c {clone}/constraints.txt hatchling")


@pytest.mark.parametrize("name", ["slipstream", "slipstream_client"])
def test_an_sdist_without_a_compiler_says_what_to_install(
    name: str, built: Path, tmp_path: Path
) -> None:
    [path] = built.glob(f"{name}-*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"],
        cwd=tmp_path / path.name.removesuffix(".tar.gz"),
        env=ENVIRONMENT | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("apt-get install gcc python3-dev")


def test_the_sdist_has_the_packages_and_no_tests(built: Path) -> None:
    [path] = built.glob("slipstream-*.tar.gz")
    with tarfile.open(path) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames()]
    tops = {name.split("/")[0] for name in names}
    assert tops >= {"pyproject.toml", "constraints.txt", "LICENSE", "README.md", "PKG-INFO"}
    assert not tops & {"tests", "docs", "examples", "scripts"}
    assert not [name for name in names if name.startswith("benchmarks/results")]


def test_the_wheel_names_its_extras_and_pythons(wheel: Path) -> None:
    [metadata] = [text for name, text in contents(wheel).items() if name.endswith("/METADATA")]
    fields = Parser().parsestr(metadata.decode())
    assert fields["Requires-Python"] == ">=3.11"
    extras = {"gpu", "otel", "plots", "ray", "tokenizers", "tp"}
    assert extras <= set(fields.get_all("Provides-Extra", []))
    required = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" in line]
    for extra in extras:
        assert [line for line in required if f"extra == '{extra}'" in line], extra


def test_the_wheel_has_the_pages_files_and_the_licences_of_what_it_brings(wheel: Path) -> None:
    found = contents(wheel)
    page = ROOT / "api" / "slipstream" / "http" / "page"
    for path in page.rglob("*.*"):
        assert found[str(path.relative_to(ROOT / "api"))] == path.read_bytes()
    licences = [text for name, text in found.items() if name.endswith("vendor/LICENSES.txt")]
    assert licences == 2 * [(page / "vendor" / "LICENSES.txt").read_bytes()]  # and in .dist-info


def test_the_packages_are_the_wheels(environment: Path, tmp_path: Path) -> None:
    program = f"import {', '.join(PACKAGES)}\nfor name in {PACKAGES}: print(eval(name).__file__)"
    files = run([environment / "bin" / "python", "-c", program], tmp_path).split()
    assert len(files) == len(PACKAGES)
    assert all(file.startswith(str(environment)) for file in files)


def test_the_command_has_help_and_a_version(environment: Path, tmp_path: Path) -> None:
    command = environment / "bin" / "slipstream"
    assert run([command, "--help"], tmp_path).startswith("usage: slipstream ")
    assert wheel_version() in run([command, "--version"], tmp_path)


def wheel_version() -> str:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    [version] = [line.split('"')[1] for line in lines if line.startswith("version = ")]
    return version


def test_it_answers_from_the_model_that_the_wheel_brings(environment: Path, tmp_path: Path) -> None:
    asked = ["generate", "--prompt", "Exceptions are a means of", "--max-tokens", "12"]
    asked += ["--temperature", "0"]  # else a word or two may be all
    with tempfile.TemporaryDirectory(prefix="run-") as short:  # a socket's path has 100 bytes
        private = {"XDG_RUNTIME_DIR": short, "HOME": str(tmp_path)}
        private["PATH"] = str(environment / "bin")  # where there is no compiler
        said = run([environment / "bin" / "slipstream", *asked], tmp_path, **private)
    assert len(said.split()) > 3
