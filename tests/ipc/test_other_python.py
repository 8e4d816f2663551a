"""A module of ours run by the Python of another environment."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from slipstream_ipc.other_python import STARTED_BY, command
from slipstream_ipc.process import installed_version

NEEDED = ("msgspec", "zmq", "numpy", "numpy.libs", "pyzmq.libs", "psutil")
PROBE = """
import json, os, sys
import llguidance, slipstream_core, slipstream_ipc
from slipstream_ipc.child import module_command
from slipstream_ipc.process import installed_version
found = {}
for name in ("slipstream", "tokenizers", "msgspec", "other"):
    try:
        found[name] = __import__(name).__file__
    except ImportError:
        found[name] = None
print(json.dumps([
    sys.executable, sys.argv, installed_version(), module_command("a.module"),
    [each.__file__ for each in (llguidance, slipstream_core, slipstream_ipc)], found,
]))
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Another environment, with a package that shadows one of ours and the least that we need."""
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder / "env", with_pip=False)
    python = str(folder / "env" / "bin" / "python")
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    paths = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    site = Path(paths.stdout.strip())
    spec = find_spec("msgspec")
    assert spec is not None
    assert spec.origin is not None
    for name in NEEDED:
        (site / name).symlink_to(Path(spec.origin).parents[1] / name)
    for name in ("other", "llguidance", "slipstream_core"):  # of the latter two ours is taken
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("")
    return python, site


def test_our_packages_are_this_installations_and_the_others_the_environments(
    other: tuple[str, Path], tmp_path: Path
) -> None:
    python, site = other
    (tmp_path / "probe.py").write_text(PROBE)
    import llguidance

    import slipstream_core
    import slipstream_ipc

    argv = [*command(python, "probe"), "an argument"]
    places = json.loads(argv[3]) | {"probe": str(tmp_path)}
    argv[3] = json.dumps(places)
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    executable, given, ours, children, files, found = json.loads(done.stdout)
    assert executable == python
    assert given[1:] == ["an argument"]
    assert ours == installed_version() == version("slipstream")
    assert files == [each.__file__ for each in (llguidance, slipstream_core, slipstream_ipc)]
    assert found["other"] == str(site / "other" / "__init__.py")
    assert found["msgspec"].startswith(str(site))
    assert found["slipstream"] is None  # what is not asked for stays out
    assert found["tokenizers"] is None
    assert children == [python, "-P", argv[2], argv[3], "a.module"]


def test_children_of_a_usual_process_are_started_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream_ipc.child import module_command

    monkeypatch.delenv(STARTED_BY, raising=False)
    assert module_command("a.module") == [sys.executable, "-P", "-m", "a.module"]
