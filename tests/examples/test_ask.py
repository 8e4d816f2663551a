"""One program and one request, the same for one server and for eight replicas; `scripts/ray-tests`
has them on Ray.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.everywhere import by_curl, by_program
from tests.helpers.processes import started
from tests.helpers.stacks import spareless_stack

from slipstream.client.endpoints import address_in
from slipstream.demo_model import MODEL_PATH

pytestmark = pytest.mark.process

MODEL = f"simulated:step_ms=5,prefill_us=20,tokenizer={MODEL_PATH},mode=chain"


def test_the_same_for_one_server_and_for_eight_replicas(tmp_path: Path) -> None:
    with spareless_stack(MODEL, http_port=0) as stack:
        assert stack.http_address is not None
        said = by_program(stack.address)
        assert len(said) > 60
        assert by_curl(int(stack.http_address.rpartition(":")[2])) == said
    serve = [sys.executable, "-m", "slipstream.cli.main", "serve", MODEL, "--port", "0"]
    options = ["--replicas", "8", "--no-spare-worker", "--runtime-dir", str(tmp_path / "r")]
    with started([*serve, *options], stdout=subprocess.PIPE, text=True) as process:
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line
            found = re.search(r"http://[\w.]+:(\d+)", line)
        assert by_program(address_in(tmp_path / "r")) == said
        assert by_curl(int(found[1])) == said
        process.terminate()
        process.stdout.read()
