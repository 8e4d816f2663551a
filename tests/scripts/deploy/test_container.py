"""The Containerfile's steps, read from it and run in a temporary folder by an unprivileged user.

No image is built: the apt and useradd steps are not run, and folders and the port are other ones.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.ports import free_port

ROOT = Path(__file__).parents[3]
CONTAINERFILE = ROOT / "scripts" / "deploy" / "Containerfile"
NOBODY = 65534
INSTALL_S = 5 * PATIENCE_S


def instructions() -> list[tuple[str, str]]:
    """The Containerfile's instructions and their arguments, comments and line breaks removed."""
    lines = [line for line in CONTAINERFILE.read_text().splitlines() if not line.startswith("#")]
    found = re.findall(r"^([A-Z]+) (.*)$", "\n".join(lines).replace("\\\n", " "), re.MULTILINE)
    return [(name, " ".join(rest.split())) for name, rest in found]


STEPS = instructions()


def step(name: str) -> str:
    """The arguments of an instruction that is there once."""
    [rest] = [rest for each, rest in STEPS if each == name]
    return rest


def python() -> tuple[str, dict[str, int]]:
    """An interpreter, and as which user a process is to run it: not root, where that may be."""
    if os.geteuid() != 0:
        return sys.executable, {}
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (os.path.realpath(sys.executable), shutil.which(version, path="/usr/bin")):
        user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        try:
            if path is not None:
                subprocess.run([path, "-c", ""], check=True, **user)
                return path, user
        except OSError:
            continue
    pytest.skip("no Python of this version can be run by a user other than root")


class Image:
    """What the steps make: a folder in place of /, and an environment in place of the image's."""

    def __init__(self, folder: Path, *, with_packages: bool) -> None:
        """with_packages: the packages of this environment are there before the steps."""
        interpreter, self.user = python()
        self.folder = folder
        self.work = folder / step("WORKDIR").strip("/")
        self.bin = folder / "venv" / "bin"
        for each in ("home", "tmp", "run"):
            (folder / each).mkdir()
        self.work.mkdir(parents=True)
        self._own(folder)
        self.run([interpreter, "-m", "venv", "--without-pip", folder / "venv"])
        own = self.run(
            [self.bin / "python", "-c", "import sysconfig as s; print(s.get_path('purelib'))"]
        )
        site = Path(own.strip())
        if with_packages:
            (site / "others.pth").write_text(sysconfig.get_path("purelib"))
        else:
            pip_of = [sys.executable, "-m", "pip", "--python", self.bin / "python"]
            subprocess.run([*pip_of, "install", "--quiet", "pip"], check=True, timeout=INSTALL_S)
            self._own(folder / "venv")
        pip = self.bin / "pip"
        program = "import sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
        pip.write_text(f"#!{self.bin}/python\n{program}")
        pip.chmod(0o755)

    def _own(self, folder: Path) -> None:
        for path in (folder, *folder.rglob("*")):
            if self.user:
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)

    @property
    def environment(self) -> dict[str, str]:
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        return {
            "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            **pip,
        }

    def copy(self) -> None:
        """The COPY steps."""
        for name, rest in STEPS:
            if name == "COPY" and not rest.startswith("--from"):
                *sources, target = rest.split()
                for source in sources:
                    path = self.work / target
                    if target.endswith("/") and (ROOT / source).is_file():
                        path /= Path(source).name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if (ROOT / source).is_dir():
                        no_caches = shutil.ignore_patterns("__pycache__")
                        shutil.copytree(ROOT / source, path, ignore=no_caches)
                    else:
                        shutil.copy(ROOT / source, path)
        self._own(self.work)

    def install(self) -> str:
        """The RUN steps that call pip. Returns what they print."""
        steps = [rest for name, rest in STEPS if name == "RUN" and "pip install" in rest]
        assert steps
        return "".join(self.run(["sh", "-ec", rest]) for rest in steps)

    def run(self, command: list[Any]) -> str:
        done = subprocess.run(
            command,
            cwd=self.work,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_S,
            check=False,
            **self.user,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def inner(self, command: list[str], port: int) -> list[str]:
        """A command of the image, with this folder's paths and another port."""
        run = str(self.folder / "run" / "s")
        return [
            word.replace("/run/slipstream", run).replace(":8000/", f":{port}/") for word in command
        ]


@pytest.fixture(
    scope="module",
    params=[True, False],
    ids=["packages-are-there", "packages-are-downloaded"],
)
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    # not pytest's folder, which no other user may enter
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        made = Image(Path(folder), with_packages=request.param)
        made.copy()
        assert "Successfully installed" in made.install()
        yield made


def test_pip_brings_everything_that_the_server_needs(image: Image) -> None:
    shutil.rmtree(image.work)  # what is installed does not need it
    image.work.mkdir()
    where = image.run(["python", "-c", "import slipstream; print(slipstream.__file__)"])
    assert where.startswith(str(image.folder / "venv"))


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([a-zA-Z0-9._-]+)==([^\s\\]+)", text, re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_what_is_served_has_what_was_built_and_no_compiler() -> None:
    last = max(at for at, (name, _) in enumerate(STEPS) if name == "FROM")
    served = STEPS[last:]
    assert ("COPY", "--from=build /usr/local /usr/local") in served
    installing = [rest for name, rest in served if name == "RUN" and "install" in rest]
    assert [rest.startswith('[ -z "$PACKAGES" ] ||') for rest in installing] == [True, False]
    assert installing[1].startswith("useradd ")
    assert not [rest for _, rest in served if "gcc" in rest]


def pip_steps() -> list[list[str]]:
    """The words of each call of pip that installs."""
    found = [rest for name, rest in STEPS if name == "RUN" and "pip install" in rest]
    calls = [shlex.split(each) for rest in found for each in rest.split(" && ")]
    return [words for words in calls if words[:2] == ["pip", "install"]]


def requirements() -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each requirement of the files that pip installs from."""
    found = {}
    for words in pip_steps():
        for flag, file in itertools.pairwise(words):
            if flag != "-r":
                continue
            lines = [each for each in (ROOT / file).read_text().splitlines() if each[:1] != "#"]
            for each in "\n".join(lines).replace("\\\n", " ").splitlines():
                pinned = re.fullmatch(
                    r"([\w.-]+)==(\S+)((?: +--hash=sha256:[0-9a-f]{64})+) *", each
                )
                assert pinned is not None, f"{each[:60]} has no version or no hash"
                name = pinned[1].lower().replace("_", "-")
                found[name] = pinned[2], re.findall(r"sha256:(\w+)", pinned[3])
    return found


def test_every_requirement_has_the_version_of_the_constraints_and_a_hash() -> None:
    known = pins((ROOT / "constraints.txt").read_text())
    found = {name: version for name, (version, _) in requirements().items()}
    assert len(found) > 50
    assert {each: found[each] for each in found.keys() & known.keys()} == {
        each: known[each] for each in found.keys() & known.keys()
    }


def test_nothing_is_downloaded_without_a_hash() -> None:
    steps = pip_steps()
    assert len(steps) == 3
    for words in steps:
        assert "--no-deps" in words, "nothing but what is named"
        files = [file for flag, file in itertools.pairwise(words) if flag == "-r"]
        named = [each for each in words[2:] if each[0] != "-" and each not in files]
        if "--no-index" in words:
            assert all((ROOT / each).is_dir() for each in named), "sources that were copied"
        else:
            assert "--require-hashes" in words
            assert all(each.startswith("https://") for each in named), "an index"
    ran = [rest for name, rest in STEPS if name in ("RUN", "ADD")]
    assert not [each for each in ran if re.search(r"\b(curl|wget|easy_install|uv|git)\b", each)]


def test_torch_is_the_wheel_whose_hash_is_pinned() -> None:
    """pip refuses any other file, and takes this one, where the CPU's wheel is at hand."""
    _, hashes = requirements()["torch"]
    assert len(hashes) == 2  # x86_64's and aarch64's
    [words] = [each for each in pip_steps() if each[-1].startswith("https://")]
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "torch-2.13.0-py3-none-any.whl"
        with zipfile.ZipFile(other, "w") as wheel:
            wheel.writestr("torch-2.13.0.dist-info/METADATA", "Name: torch\nVersion: 2.13.0\n")
        command = [sys.executable, "-m", "pip", *words[1:-2], "--target", f"{folder}/target"]
        command += ["--no-index", "--find-links", folder]
        own = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**own, "PIP_CONFIG_FILE": os.devnull},
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_S,
        )
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert hashes[0] in done.stderr


def test_all_that_slipstream_asks_for_has_a_pin() -> None:
    asked = []
    for path in (ROOT, ROOT / "packaging" / "client"):
        project = tomllib.loads((path / "pyproject.toml").read_text())
        asked += [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    names = {re.split(r"[^a-zA-Z0-9._-]", each)[0].lower().replace("_", "-") for each in asked}
    assert names - requirements().keys() == {"slipstream-client"}


def test_the_entry_point_serves_and_the_health_check_says_so(image: Image) -> None:
    port = free_port()
    entry = image.inner(json.loads(step("ENTRYPOINT")), port)
    options, _, check = step("HEALTHCHECK").partition("CMD ")
    assert re.fullmatch(r"(--[a-z-]+=\d+s ?)+", options)
    check = image.inner(json.loads(check), port)
    asked: dict[str, Any] = {"cwd": image.work, "env": image.environment, **image.user}

    def health() -> int:
        return subprocess.run(check, stderr=subprocess.DEVNULL, check=False, **asked).returncode

    assert health() != 0
    asked["env"] = {**image.environment, "SLIPSTREAM_HTTP_PORT": str(port)}
    with subprocess.Popen(
        entry, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **asked
    ) as server:
        hang = threading.Timer(PATIENCE_S, server.kill)
        hang.start()
        told = ""
        try:
            assert server.stdout is not None
            for line in server.stdout:
                told += line
                if "serving at" in line:
                    break
            assert health() == 0, told
            command = [image.bin / "slipstream", "generate", "In Python,", "--max-tokens", "4"]
            address = f"ipc://{image.folder}/run/s/client.sock"
            assert image.run([*command, "--address", address])
            server.send_signal(getattr(signal, step("STOPSIGNAL")))
            told += server.stdout.read()
            assert server.wait() == 0, told
        finally:
            hang.cancel()
            server.kill()
    assert health() != 0
    assert not (image.folder / "run" / "s").exists() or not list(
        (image.folder / "run" / "s").iterdir()
    )


def test_its_user_is_not_root_and_its_port_is_the_servers() -> None:
    [make_user] = [rest for name, rest in STEPS if name == "RUN" and "useradd" in rest]
    words = shlex.split(make_user)
    assert step("USER") == words[words.index("&&") - 1] != "root"
    [folder] = re.findall(r"--runtime-dir\W+(/\S+?)\"", step("ENTRYPOINT"))
    assert folder in make_user.split()
    home = f"/home/{step('USER')}"
    assert "--create-home" in make_user
    assert f"{home}/.cache" in make_user.split()  # volumes that are mounted there are then its own
    assert step("EXPOSE") == "8000"
    assert json.loads(step("ENTRYPOINT"))[:2] == ["slipstream", "serve"]
