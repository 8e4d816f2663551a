"""The systemd unit: what systemd says of it, and a server that runs under its restrictions."""

from __future__ import annotations

import ctypes.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from tests.helpers import systemd_unit
from tests.helpers.patience import PATIENCE_S
from tests.helpers.ports import free_port

from slipstream.stack.supervisor import FAILED, MISCONFIGURED

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "scripts" / "deploy" / "slipstream.service"
SETTINGS = systemd_unit.read_unit(UNIT)
PROGRAM = str(Path(sys.executable).with_name("slipstream"))
HAS_ANALYZE = shutil.which("systemd-analyze") is not None
needs_systemd = pytest.mark.skipif(not HAS_ANALYZE, reason="needs systemd-analyze")
# of 0 to 10, in tenths; systemd calls less than 5 OK
MOST_EXPOSED = 20
PROBE = """
import json, os, socket
def outcome(call):
    try:
        call()
        return "may"
    except OSError as error:
        return error.errno
print(json.dumps({
    "chroot": outcome(lambda: os.chroot("/")),
    "netlink": outcome(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
    "tcp": outcome(lambda: socket.socket().close()),
    "umask": os.umask(0),
}))
"""


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def command(folder: Path) -> list[str]:
    """The unit's command line in this environment, under its restrictions."""
    line = SETTINGS["ExecStart"][-1].replace("${RUNTIME_DIRECTORY}", str(folder / "run" / "s"))
    program, *arguments = line.split()
    assert program == "/opt/slipstream/.venv/bin/slipstream"
    sandbox = [sys.executable, systemd_unit.__file__, str(UNIT), str(folder)]
    return [*sandbox, PROGRAM, *arguments]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """What systemd gives the command, and what the unit adds."""
    given = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": str(folder / "tmp")}
    for pair in SETTINGS["Environment"][-1].split():
        name, _, value = pair.partition("=")
        given[name] = value.replace("%C", str(folder / "cache"))
    return given | more


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("unit")
    for name in ("run", "cache/slipstream", "tmp"):
        (made / name).mkdir(parents=True)
    return made


@needs_systemd
def test_systemd_finds_nothing_wrong_with_it(tmp_path: Path) -> None:
    text = UNIT.read_text()
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace("/opt/slipstream/.venv/bin/slipstream", PROGRAM))
    done = analyze("verify", str(unit))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    unit.write_text(unit.read_text().replace("LockPersonality=", "LockPersonalty="))
    assert "LockPersonalty" in analyze("verify", str(unit)).stderr


@needs_systemd
def test_systemd_rates_its_exposure_as_ok() -> None:
    rating = ["security", "--offline=true", "--no-pager"]
    done = analyze(*rating, f"--threshold={MOST_EXPOSED}", str(UNIT))
    assert done.returncode == 0, done.stdout
    assert re.search(r"Overall exposure level for slipstream.service: \d\.\d OK", done.stdout)
    assert analyze(*rating, "--threshold=5", str(UNIT)).returncode == 1  # it does measure


def test_it_restricts_what_the_server_does_not_need() -> None:
    on = {name for name, values in SETTINGS.items() if values == ["yes"]}
    assert {"NoNewPrivileges", "DynamicUser", "PrivateTmp", "LockPersonality"} <= on
    assert {"ProtectHome", "ProtectKernelModules", "RestrictNamespaces", "RestrictSUIDSGID"} <= on
    assert SETTINGS["ProtectSystem"] == ["strict"]
    assert SETTINGS["CapabilityBoundingSet"] == [""]
    assert SETTINGS["SystemCallFilter"] == ["@system-service", "~@privileged"]
    assert "PrivateDevices" not in SETTINGS  # it hides cards
    assert "MemoryDenyWriteExecute" not in SETTINGS  # oneDNN, Triton and CUDA generate code


@pytest.fixture
def needs_sandbox() -> None:
    if not HAS_ANALYZE or ctypes.util.find_library("seccomp") is None:
        pytest.skip("needs systemd-analyze and libseccomp")


@pytest.mark.usefixtures("needs_sandbox")
def test_the_sandbox_of_these_tests_restricts(folder: Path) -> None:
    python = [*command(folder)[:4], sys.executable, "-c", PROBE]
    done = subprocess.run(python, stdout=subprocess.PIPE, timeout=PATIENCE_S, check=True)
    assert json.loads(done.stdout) == {"chroot": 1, "netlink": 1, "tcp": "may", "umask": 0o77}


@pytest.mark.usefixtures("needs_sandbox")
def test_a_server_runs_under_its_restrictions(folder: Path) -> None:
    port = free_port()
    given = environment(folder, SLIPSTREAM_HTTP_PORT=str(port), SLIPSTREAM_SPARE_CORE="false")
    with subprocess.Popen(
        command(folder), env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        hang = threading.Timer(PATIENCE_S, server.kill)
        hang.start()
        try:
            told = wait_for(server, "serving at")
            kernels = list((folder / "cache" / "slipstream").rglob("*.so"))
            assert bool(kernels) == (shutil.which("cc") is not None)
            [worker] = re.findall(r"worker ready \(process (\d+)", told)
            before = answer(port)
            os.kill(int(worker), signal.SIGKILL)
            wait_for(server, "worker restarted")
            assert answer(port) == before
            server.send_signal(signal.SIGTERM)
            wait_for(server, "")
            assert server.wait() == 0
        finally:
            hang.cancel()
            server.kill()


def test_a_proxy_of_the_group_reaches_the_http_socket_and_no_other(folder: Path) -> None:
    """With the drop-in of docs/deploying.md."""
    shared = folder / "run" / "s"
    shared.mkdir(mode=0o750)
    given = environment(
        folder, SLIPSTREAM_MODEL="simulated:step_ms=1", SLIPSTREAM_UDS=str(shared / "http.sock")
    )
    line = command(folder)
    with subprocess.Popen(
        line[line.index(PROGRAM) :], env=given, umask=0o007, stdout=subprocess.PIPE, text=True
    ) as server:
        hang = threading.Timer(PATIENCE_S, server.kill)
        hang.start()
        try:
            wait_for(server, "serving at")
            http, private = shared / "http.sock", shared / "private"
            assert (http.stat().st_mode & 0o777, private.stat().st_mode & 0o777) == (0o770, 0o700)
            assert {path.name for path in shared.iterdir()} == {"http.sock", "private"}
            server.send_signal(signal.SIGTERM)
            wait_for(server, "")
            assert server.wait() == 0
        finally:
            hang.cancel()
            server.kill()


def wait_for(server: subprocess.Popen[str], word: str) -> str:
    """What the server says up to a line with this word; all that it says to its end, if empty."""
    told = ""
    assert server.stdout is not None
    for line in server.stdout:
        told += line
        if word and word in line:
            return told
    assert not word, told
    return told


def answer(port: int) -> str:
    body = json.dumps({"prompt": "In Python,", "max_tokens": 8, "temperature": 0}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["/nowhere/model"], "MODEL: got '/nowhere/model'"),
        (["--max-num-seqs", "0"], "--max-num-seqs: got"),
        (["--max-nun-seqs", "8"], "did you mean --max-num-seqs?"),
        (["simulated:stp_ms=1", "--no-http"], "known: step_ms"),  # found by the core's process
    ],
)
def test_where_the_configuration_is_at_fault_it_is_not_restarted(
    tmp_path: Path, options: list[str], said: str
) -> None:
    done = serve(tmp_path, *options)
    assert said in done.stderr
    assert done.returncode == MISCONFIGURED
    assert str(MISCONFIGURED) in SETTINGS["RestartPreventExitStatus"][-1].split()


def test_where_a_restart_may_help_it_is_restarted(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve(tmp_path, "simulated:step_ms=1", "--http-port", str(port))
    assert "Address already in use" in done.stderr
    assert done.returncode == FAILED
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)}
    done = serve(tmp_path, "organisation/model", **hub)
    assert "cannot be reached" in done.stderr
    assert done.returncode == FAILED
    assert str(FAILED) not in SETTINGS["RestartPreventExitStatus"][-1].split()
    assert SETTINGS["Restart"] == ["on-failure"]


def serve(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, "serve", "--runtime-dir", str(folder / "run"), *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **variables},
        check=False,
    )
