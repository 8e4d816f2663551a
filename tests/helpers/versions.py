"""Installed copies of Slipstream: of these sources, or of a commit before."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import slipstream
import slipstream_core
import slipstream_ipc
import slipstream_worker

ROOT = Path(__file__).parents[2]
PACKAGES = [
    Path(path)
    for package in (slipstream, slipstream_core, slipstream_ipc, slipstream_worker)
    for path in package.__path__
]
_FOLDERS = ("api", "engine_core", "output_worker", "ipc")


def install(environment: Path, number: str, packages: Sequence[Path] = PACKAGES) -> Path:
    """Make a virtual environment with copies of these packages under a version's number, and all
    that they depend on. Returns the folder that they are in.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    lib = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    site = environment / lib
    # dependencies alone: the .pth files of these folders, an editable install's, are not followed
    folders = [each for each in sys.path if Path(each).name == "site-packages"]
    (site / "others.pth").write_text("\n".join(folders))
    for package in packages:
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package, site / package.name, ignore=no_caches)
    about = site / f"slipstream-{number}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: slipstream\nVersion: {number}\n")
    script = environment / "bin" / "slipstream"  # as pip writes it: with the environment's own path
    start = "import sys\nfrom slipstream.cli.main import main\nsys.exit(main())\n"
    script.write_text(f"#!{environment}/bin/python\n{start}")
    script.chmod(0o755)
    return site


def packages_of_commit(commit: str, folder: Path) -> list[Path] | None:
    """The packages as they were at a commit, with their C compiled; None where the repository does
    not have it.
    """
    if shutil.which("git") is None:
        return None
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", commit, *_FOLDERS, "packaging"],
        capture_output=True,
        check=False,
    )
    if archive.returncode:
        return None
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    # as in a clone, an import compiles it
    subprocess.run([sys.executable, "-c", "import slipstream_ipc"], cwd=folder / "ipc", check=True)
    return [path for each in _FOLDERS for path in (folder / each).glob("slipstream*")]
