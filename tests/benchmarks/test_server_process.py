"""A peer's server ends with the benchmark, whatever it started."""

from __future__ import annotations

import sys

import psutil

from slipstream_lab.peers.server_process import free_port, server_process

# it starts a process that no signal to it ends, and answers
_SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def test_what_a_server_started_ends_with_it() -> None:
    port = free_port()
    command = [sys.executable, "-c", _SERVER, str(port)]
    with server_process("the server", command, port, {}) as pid:
        [child] = psutil.Process(pid).children()
        assert child.is_running()
    _, alive = psutil.wait_procs([child], timeout=60)
    assert not alive
    assert not psutil.pid_exists(pid)
