"""A version in place of another, as docs/deploying.md says: every stream ends text-identical.

The newer version is a copy of this one with another number and with fields appended to messages, as
a later version may have them.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.helpers.http_front import Raw, read_events
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.ports import free_port
from tests.helpers.versions import install

from slipstream import Client

MODEL = "simulated:step_ms=5,mode=chain"
PROMPTS = [f"Clause {n}: what is asked for before the change." for n in range(3)]
PARAMS: dict[str, Any] = {"max_tokens": 700, "temperature": 0, "ignore_eos": True}
OLD = version("slipstream")
NEW = "0.99.0"
EVENTS = "Accept: text/event-stream"
# of each process's fields, what the newer version's has appended
APPENDED = {
    "messages/handshake.py": (
        "\n\n\nclass Reattach",
        '\n    motto: str = "new"\n\n\nclass Reattach',
    ),
    "messages/client.py": (
        "\n\n\nclass UnknownStreams",
        "\n    colour: int = 7\n\n\nclass UnknownStreams",
    ),
}

pytestmark = pytest.mark.process


def install_new(environment: Path) -> None:
    """An environment with the newer version."""
    site = install(environment, NEW)
    for name, (was, becomes) in APPENDED.items():
        path = site / "slipstream_ipc" / name
        text = path.read_text()
        assert was in text
        path.write_text(text.replace(was, becomes))


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both versions, each in an environment named by its number."""
    folder = tmp_path_factory.mktemp("versions")
    install(folder / OLD, OLD)
    install_new(folder / NEW)
    return folder


@pytest.fixture(scope="module")
def whole(versions: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What undisturbed streams say."""
    folder = tmp_path_factory.mktemp("whole")
    with (
        Server(versions / OLD, folder / "s", free_port()) as server,
        Client(server.address, timeout_s=PATIENCE_S) as client,
    ):
        return [each.text for each in client.generate_many(PROMPTS, **PARAMS)]


class Server:
    """A `slipstream serve` that was installed in `environment`."""

    def __init__(self, environment: Path, folder: Path, port: int, drain_s: float = 0.3) -> None:
        self.address = f"ipc://{folder}/client.sock"
        self.port = port
        self.told = ""
        options = ["--runtime-dir", folder, "--http-port", str(port), "--drain-s", str(drain_s)]
        spares = ["--spare-worker", "false", "--spare-core", "false"]
        self.process = subprocess.Popen(
            [environment / "bin" / "slipstream", "serve", MODEL, *map(str, options), *spares],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._hang = threading.Timer(2 * PATIENCE_S, self.process.kill)
        self._hang.start()
        self.wait_for("serving at")

    def wait_for(self, word: str) -> None:
        """Read what it says up to a line with this word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told += line
            if word in line:
                return
        raise AssertionError(self.told)

    @property
    def version(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/version") as answer:
            found: str = json.load(answer)["version"]
            return found

    def stop(self) -> None:
        """As `systemctl stop` does."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._hang.cancel()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def current(versions: Path, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a link name a version's environment, and returns the link."""
    link = tmp_path / "current"

    def name(number: str) -> Path:
        following = tmp_path / "following"
        following.symlink_to(versions / number)
        following.replace(link)
        return link

    return name


def test_a_restart_with_a_newer_version_loses_no_stream(
    current: Callable[[str], Path], tmp_path: Path, whole: list[str]
) -> None:
    folder, port = tmp_path / "s", free_port()
    body = {"prompt": PROMPTS[2], "stream": True, **PARAMS}
    texts: list[str] = ["", ""]
    begun = threading.Barrier(2)

    def read(client: Client) -> None:
        is_begun = False
        with client.stream_many(PROMPTS[:2], **PARAMS) as streams:
            for index, delta in streams:
                texts[index] += delta.text
                if not is_begun and all(texts):
                    is_begun = True
                    begun.wait(PATIENCE_S)

    with Server(current(OLD), folder, port) as old:
        assert old.version == OLD
        with Client(old.address, timeout_s=PATIENCE_S) as client, Raw(port) as raw:
            reader = threading.Thread(target=read, args=(client,))
            reader.start()
            begun.wait(PATIENCE_S)
            raw.post("/v1/completions", body, EVENTS)
            assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
            first = raw.read_chunk()
            environment = current(NEW)
            old.stop()
            text, last, is_whole = read_events(raw, first)
            assert last
            assert not is_whole
            assert reader.is_alive()  # it has more to say than the drain allows
            with Server(environment, folder, port) as new, Raw(port) as again:
                assert new.version == NEW
                again.post("/v1/completions", body, f"Last-Event-ID: {last}")
                assert again.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
                rest, _, is_whole = read_events(again)
                reader.join(PATIENCE_S)
                fresh = client.generate(PROMPTS[0], **PARAMS).text  # the client is an older version
    assert is_whole
    assert [*texts, text + rest] == whole
    assert fresh == whole[0]


def test_before_the_restart_its_processes_are_replaced_by_their_own_version(
    current: Callable[[str], Path], versions: Path, tmp_path: Path, whole: list[str]
) -> None:
    with (
        Server(current(OLD), tmp_path / "s", free_port()) as old,
        Client(old.address, timeout_s=PATIENCE_S) as client,
    ):
        stream = client.stream(PROMPTS[0], **PARAMS)
        text = next(stream).text
        current(NEW)
        [pid] = re.findall(r"worker ready \(process (\d+)", old.told)
        psutil.Process(int(pid)).kill()
        old.wait_for("worker restarted")
        [pid] = re.findall(r"worker restarted \(process (\d+)", old.told)
        assert psutil.Process(int(pid)).cmdline()[0].startswith(f"{versions / OLD}/")
        assert text + "".join(delta.text for delta in stream) == whole[0]


def test_a_version_that_is_installed_over_a_running_one_does_not_mix_with_it(
    tmp_path: Path, whole: list[str]
) -> None:
    environment, port = tmp_path / "one", free_port()
    install(environment, OLD)
    with (
        Server(environment, tmp_path / "s", port) as old,
        Client(old.address, timeout_s=PATIENCE_S) as client,
    ):
        stream = client.stream(PROMPTS[0], **PARAMS)
        text = next(stream).text
        [site] = environment.glob("lib/*/site-packages")
        for folder in (*site.glob("slipstream*"), environment / "bin"):
            shutil.rmtree(folder)
        install_new(environment)
        [pid] = re.findall(r"worker ready \(process (\d+)", old.told)
        psutil.Process(int(pid)).kill()
        old.wait_for(f"the stack runs version {OLD}, and version {NEW} is installed by now")
        assert old.process.wait(PATIENCE_S) == 1  # systemd starts it again
        with Server(environment, tmp_path / "s", port) as new:
            assert new.version == NEW
            assert text + "".join(delta.text for delta in stream) == whole[0]


def test_behind_a_proxy_the_old_one_ends_what_it_has_while_the_new_one_serves(
    versions: Path, tmp_path: Path, whole: list[str]
) -> None:
    body = {"prompt": PROMPTS[0], "stream": True, **PARAMS}
    with (
        Server(versions / OLD, tmp_path / "a", free_port(), drain_s=1e6) as old,
        Server(versions / NEW, tmp_path / "b", free_port()) as new,
        Raw(old.port) as raw,
        Client(old.address, timeout_s=PATIENCE_S) as client,
    ):
        raw.post("/v1/completions", body)
        assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
        first = raw.read_chunk()
        stream = client.stream(PROMPTS[1], **PARAMS)
        text = next(stream).text
        old.process.send_signal(signal.SIGTERM)
        patience = Patience()
        while ready(old.port) != 503:  # from then on a proxy sends requests to the other one
            patience.wait()
        assert ready(new.port) == 200
        with Raw(new.port) as other:
            other.post("/v1/completions", body)
            assert other.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
            assert read_events(other)[0] == whole[0]
        assert read_events(raw, first) == (whole[0], "", True)
        assert text + "".join(delta.text for delta in stream) == whole[1]
        assert old.process.wait(PATIENCE_S) == 0


def ready(port: int) -> int:
    with Raw(port) as raw:
        return raw.get("/ready").status
