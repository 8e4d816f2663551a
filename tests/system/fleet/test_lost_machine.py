"""A machine that is lost without a word: its streams go on at another replica."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.helpers.namespaces import skip_without_namespaces
from tests.helpers.patience import PATIENCE_S


@pytest.mark.process
def test_machine_lost_by_link_down() -> None:
    skip_without_namespaces("a lost machine")
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
