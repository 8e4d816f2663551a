"""A machine that is lost without a word: its streams go on at another replica."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings

import pytest
from tests.helpers.patience import PATIENCE_S

TOOLS = ("ip", "unshare", "nsenter")


def may_have_namespaces() -> bool:
    if not all(map(shutil.which, TOOLS)):
        return False
    making = "ip link add near type veth peer name far"
    done = subprocess.run(["unshare", "-n", *making.split()], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.slow
def test_machine_lost_by_link_down() -> None:
    if not may_have_namespaces():
        why = "no network namespaces with links can be made here: a lost machine is NOT tested"
        warnings.warn(why, stacklevel=1)
        pytest.skip(why)
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-m", "tests.helpers.lost_machine"],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["texts"] == told["plain"]
    assert sum(told["moves"]) > 0
    assert set(told["moves"]) <= {0, 1}
