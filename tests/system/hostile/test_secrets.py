"""A whole stack that says all it can say, asked in every way: nothing secret is in what it says."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.ports import free_port

from slipstream import Client, SlipstreamError
from slipstream.cli.keys import add_client, make_folder

API_KEY = "sk-correct-horse-battery"
WRONG_KEY = "sk-somebody-elses-key"
MARK = "plover"  # in every prompt


def secret_in(path: Path) -> str:
    return path.read_text().split('secret-key = "')[1].split('"')[0]


class Served:
    """`slipstream serve`, at its most talkative."""

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "keys"
        make_folder(self.keys)
        self.tcp = f"tcp://127.0.0.1:{free_port()}"
        self.log = folder / "stderr"
        self._stdout = folder / "stdout"
        command = [sys.executable, "-m", "slipstream.cli.main", "serve", "simulated:step_ms=1"]
        options = ["--runtime-dir", str(folder / "run"), "--http-port", "0"]
        options += ["--listen", self.tcp, "--keys", str(self.keys), "--drain-s", "0"]
        environment = {
            **os.environ,
            "SLIPSTREAM_API_KEY": API_KEY,
            "SLIPSTREAM_LOG_LEVEL": "DEBUG",
            "PYTHONUNBUFFERED": "1",
        }
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, *options], stdout=subprocess.PIPE, stderr=errors, env=environment
            )
        self.said = ""
        while "try:" not in self.said:
            self.read_line()
        self.read_line()
        self.read_line()
        self.port = int(self.said.rpartition("http://127.0.0.1:")[2].split("/")[0])

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line, self.log.read_text()
        self.said += line
        return line

    def post(self, path: str, body: bytes, key: str | None = API_KEY) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        answer = response.status, response.read()
        connection.close()
        return answer

    def worker_pid(self) -> int:
        words = self.said.split("worker ready (process ")[1]
        return int(words.split(",")[0])

    def stop(self) -> str:
        """Everything it has said."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.said + out.decode() + self.log.read_text()


@pytest.fixture
def served(tmp_path: Path) -> Served:
    served = Served(tmp_path)
    try:
        yield served
    finally:
        served.process.kill()
        served.process.wait(PATIENCE_S)


@pytest.mark.process
def test_nothing_secret_is_in_logs_at_debug_level(served: Served, tmp_path: Path) -> None:
    ids = []
    make_folder(tmp_path / "others")
    _, theirs = add_client(tmp_path / "others", "them")
    (theirs.parent / "server.key").write_bytes((served.keys / "server.key").read_bytes())
    with Client(served.tcp, keys=served.keys) as client:
        ids.append(client.generate(f"say {MARK}", max_tokens=5).id)
        with client.stream(f"{MARK} for ever", max_tokens=1000) as stream:
            next(iter(stream))
            ids.append(stream.id)
            os.kill(served.worker_pid(), signal.SIGKILL)  # another takes its place
            next(iter(stream))
        with pytest.raises(SlipstreamError):
            client.generate(f"{MARK} " * 20_000, max_tokens=5)
        with contextlib.suppress(SlipstreamError):
            client.generate([{"role": "user", "content": MARK}], max_tokens=5)
    with pytest.raises(SlipstreamError, match="not accept"):
        Client(served.tcp, keys=theirs)
    prompt = {"prompt": f"{MARK}!", "max_tokens": 5}
    status, body = served.post("/v1/completions", json.dumps(prompt).encode())
    assert status == 200, body
    ids.append(json.loads(body)["id"].removeprefix("cmpl-"))
    streamed = json.dumps({**prompt, "stream": True}).encode()
    assert served.post("/v1/completions", streamed)[0] == 200
    assert served.post("/v1/completions", streamed, key=WRONG_KEY)[0] == 401
    assert served.post("/v1/completions", streamed, key=None)[0] == 401
    assert served.post("/v1/completions", f'{{"prompt": "{MARK}'.encode())[0] == 400
    # the name of an unknown field is logged (decision 026), its value is not
    unknown = json.dumps({**prompt, "unheard_of": {MARK: MARK}}).encode()
    assert served.post("/v1/completions", unknown)[0] == 200
    assert served.post(f"/v1/{MARK}", b"{}")[0] == 404
    commands = processes_under(served.process.pid)
    text = served.stop()
    assert "DEBUG" in text, "it was not talkative"
    assert "unheard_of" in text
    assert served.worker_pid()
    assert len(ids) == 3
    assert all(len(bytes.fromhex(id_)) == 16 for id_ in ids)
    secrets = {
        "API key": API_KEY,
        "API key that was tried": WRONG_KEY,
        "server's secret": secret_in(served.keys / "server.key_secret"),
        "client's secret": secret_in(served.keys / "client.key_secret"),
        "stranger's secret": secret_in(theirs),
        "prompt": MARK,
        **{f"stream id {n}": id_ for n, id_ in enumerate(ids)},
    }
    shown = text.replace(f"/v1/{MARK}", "")  # a path is no prompt
    assert [name for name, secret in secrets.items() if secret in shown] == []
    assert [name for name, secret in secrets.items() if secret in commands] == []


def processes_under(pid: int) -> str:
    """The command lines of a process and its children, which every user of the machine can see."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if pid in (parent, int(folder.name)):
                lines.append((folder / "cmdline").read_bytes().decode().replace("\0", " "))
    assert len(lines) >= 4, lines
    return "\n".join(lines)
