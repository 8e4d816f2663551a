"""The container's health check asks the server, whatever proxies the environment names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.helpers.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
CONTAINERFILE = (ROOT / "scripts" / "deploy" / "Containerfile").read_text()
NOWHERE = "http://127.0.0.1:9"


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("names", [(), ("http_proxy",), ("HTTP_PROXY", "ALL_PROXY", "all_proxy")])
@pytest.mark.parametrize("status", [200, 503])
def test_a_health_check_ignores_proxies(names: tuple[str, ...], status: int) -> None:
    found = re.search(r"HEALTHCHECK.*?CMD (\[.*?\])$", CONTAINERFILE, re.DOTALL | re.MULTILINE)
    assert found is not None
    handler = type("Answering", (Health,), {"status": status})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"127.0.0.1:{server.server_port}"
        first, *rest = [each.replace("127.0.0.1:8000", where) for each in json.loads(found[1])]
        assert first == "python"
        environment = {"PATH": os.environ["PATH"], **dict.fromkeys(names, NOWHERE)}
        command = [sys.executable, *rest]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE_S)
        server.shutdown()
    assert (done.returncode == 0) == (status == 200), done.stderr
