"""`scripts/release`: what it makes is checked, signed, and refused where users would lose files."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.helpers.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
RELEASE = ROOT / "scripts" / "release"


def run(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """In the tests' own packages, as far as slipstream requires any."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"ENVIRONMENT": sys.prefix, "PYTHON": sys.executable, **variables}
    return subprocess.run(
        [RELEASE, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE_S,
        check=False,
    )


pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("signing takes ssh-keygen")
    path = tmp_path_factory.mktemp("key") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


def test_what_an_index_would_take_is_made_checked_and_signed(key: Path, tmp_path: Path) -> None:
    done = run("--key", key, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the client is whole with msgspec, numpy and pyzmq" in done.stderr
    assert "the bundled model answers: " in done.stderr
    assert "slipstream ray has its commands with slipstream-ray alone" in done.stderr
    names = {path.name for path in tmp_path.iterdir()}
    built = {name for name in names if name.endswith((".whl", ".tar.gz"))}
    assert len(built) == 6
    assert names == built | {"SHA256SUMS", "SHA256SUMS.sig"}
    sums = dict(line.split()[::-1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    assert sums == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in built
    }
    public = key.with_suffix(".pub").read_text()
    signers = tmp_path.parent / "signers"
    signers.write_text(f"us {public}")
    verify = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", "us", "-n", "slipstream-release"]
    verify += ["-s", tmp_path / "SHA256SUMS.sig"]
    signed = (tmp_path / "SHA256SUMS").read_bytes()
    assert subprocess.run(verify, input=signed, check=False).returncode == 0
    assert subprocess.run(verify, input=signed + b"\n", check=False).returncode != 0


def test_a_file_that_an_upgrade_would_lose_is_named(tmp_path: Path) -> None:
    """pip installs the new client before it removes the old slipstream."""
    previous, out = tmp_path / "previous", tmp_path / "out"
    previous.mkdir()
    with zipfile.ZipFile(previous / "slipstream-0.0.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("slipstream/errors.py", "")
        wheel.writestr("slipstream/llm.py", "")
    done = run("--previous", previous, out)
    assert done.returncode == 1
    [said] = [line for line in done.stderr.splitlines() if "an upgrade would lose" in line]
    assert said.endswith(" what was slipstream's before: slipstream/errors.py")
    assert not (out / "SHA256SUMS").exists()


def test_an_unknown_option_is_refused() -> None:
    done = run("--upload")
    assert done.returncode == 2
    assert "unknown option --upload" in done.stderr
