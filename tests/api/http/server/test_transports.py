"""TLS, unix sockets, request ids, the access log: over sockets, with curl and OpenAI's client."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.helpers.certificates import Certificate
from tests.helpers.fake_worker import Entry, FakeWorker, deltas
from tests.helpers.http_front import Front, Raw
from tests.helpers.patience import PATIENCE_S, Patience

from slipstream.errors import BadRequestError
from slipstream.http.config import Limits
from slipstream.stack.children.listeners import Listeners
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import settings_from
from slipstream.trusted_proxies import TrustedProxies
from slipstream_ipc.messages import Abort, End, Submit

GET = "GET /version HTTP/1.1\r\nHost: localhost\r\n"
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(played: FakeWorker, certificate: Certificate) -> Iterator[Front]:
    files = {"ssl_certfile": str(certificate.cert), "ssl_keyfile": str(certificate.key)}
    running = Front(played.address, limits=Limits(header_s=1.0, linger_s=0.2), **files)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def local(
    played: FakeWorker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Front, str]]:
    path = str(tmp_path_factory.mktemp("uds") / "http.sock")
    running = Front(played.address, wait=False, uds=path)
    status = running.status()
    assert (status.ready, status.detail) == (True, f"serving on unix:{path}")
    yield running, path
    running.stop()


class SecureRaw(Raw):
    """A connection on which a test says what it likes, encrypted."""

    def __init__(self, port: int, certificate: Certificate) -> None:
        super().__init__(port)
        self.socket = certificate.context().wrap_socket(self.socket, server_hostname="localhost")


def test_a_running_front_takes_up_new_keys_and_a_new_certificate(
    worker: FakeWorker, tmp_path: Path
) -> None:
    """A connection that is open stays."""
    keys = tmp_path / "keys"
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = Certificate(tmp_path / "old"), Certificate(tmp_path / "new")
    keys.touch(0o600)
    keys.write_text("one\n")
    files = {"ssl_certfile": str(old.cert), "ssl_keyfile": str(old.key), "api_key_file": str(keys)}
    front = Front(worker.address, **files)

    def status(certificate: Certificate, key: str) -> int:
        with SecureRaw(front.port, certificate) as raw:
            return raw.get("/v1/models", f"X-Api-Key: {key}").status

    try:
        assert (status(old, "one"), status(old, "two")) == (200, 401)
        with SecureRaw(front.port, old) as before:
            keys.write_text("two\n")
            patience = Patience()
            while status(old, "two") != 200:
                patience.wait("the keys are not read")
            assert status(old, "one") == 401
            old.cert.write_bytes(new.cert.read_bytes())
            old.key.write_bytes(new.key.read_bytes())
            while True:
                try:
                    assert status(new, "two") == 200
                    break
                except ssl.SSLCertVerificationError:
                    patience.wait("the certificate is not read")
            assert before.get("/v1/models", "X-Api-Key: two").status == 200
    finally:
        front.stop()


def curl(*arguments: str) -> str:
    found = subprocess.run(
        ["curl", "--no-progress-meter", "--fail", *arguments],
        capture_output=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return found.stdout.decode()


def answer_in_background(played: FakeWorker, *texts: str) -> threading.Thread:
    """The next request is answered so, a message a text."""

    def answer() -> None:
        handle, num_chars = played.expect_and_accept(), 0
        for text in texts:
            num_chars += len(text)
            end = End("stop", num_chars) if text is texts[-1] else None
            played.send(deltas(Entry(handle, text, num_chars - len(text), end=end)))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread


# ---- TLS ---------------------------------------------------------------------------------------


def test_a_stream_over_tls(played, secure, certificate):
    with SecureRaw(secure.port, certificate) as raw:
        assert raw.socket.version() in ("TLSv1.2", "TLSv1.3")
        raw.post("/v1/completions", {"prompt": "x", "stream": True})
        handle = played.expect_and_accept()
        played.send(deltas(Entry(handle, "a")))
        assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert raw.read_event()["choices"][0]["text"] == "a"
        played.send(deltas(Entry(handle, "b", 1, end=End("stop", 2))))
        assert raw.read_event()["choices"][0]["text"] == "b"
        assert raw.read_event() == "[DONE]"
        assert raw.read_chunk() == b""
        assert raw.get("/version").status == 200


def test_who_leaves_over_tls_is_noticed(played, secure, certificate):
    with SecureRaw(secure.port, certificate) as raw:
        raw.post("/v1/completions", {"prompt": "x", "stream": True})
        submit = played.expect(Submit)
        played.accept(submit)
    assert played.expect(Abort).stream_id == submit.stream_id


def test_a_refusal_over_tls_arrives_and_ends_the_connection(secure, certificate):
    with SecureRaw(secure.port, certificate) as raw:
        raw.send("nonsense\r\n\r\n")
        answer = raw.read()
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert raw.read_to_end() == b""


def test_what_speaks_no_tls_is_not_served_and_a_handshake_has_an_end(secure, certificate):
    with Raw(secure.port) as plain, Raw(secure.port) as silent:
        plain.send(GET + "\r\n")
        assert b"HTTP" not in plain.read_to_end()
        assert silent.read_to_end() == b""
    with SecureRaw(secure.port, certificate) as raw:
        assert raw.get("/version").status == 200


@needs_curl
def test_curl_over_tls(secure, certificate):
    url = f"https://localhost:{secure.port}/health"
    assert json.loads(curl("--cacert", str(certificate.authority), url)) == {"status": "ok"}


def test_openais_client_over_tls(played, secure, certificate):
    with (
        openai.DefaultHttpxClient(verify=certificate.context()) as http,
        openai.OpenAI(
            base_url=f"https://localhost:{secure.port}/v1",
            api_key="-",
            http_client=http,
            max_retries=0,
            timeout=PATIENCE_S,
        ) as client,
    ):
        answering = answer_in_background(played, "a", "b")
        stream = client.completions.create(model="fake", prompt="x", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "ab"
        answering.join(PATIENCE_S)


# ---- a unix socket -----------------------------------------------------------------------------


@needs_curl
def test_curl_over_a_unix_socket(local):
    _, path = local
    assert json.loads(curl("--unix-socket", path, "http://localhost/ready"))["model"] == "fake"
    # a proxy in front passes on the name that it was called by
    assert curl("--unix-socket", path, "http://any.example/health")


def test_openais_client_over_a_unix_socket(played, local):
    transport_of = openai.DefaultHttpxClient.__mro__[2]  # its HTTP library's Client
    library: Any = __import__(transport_of.__module__.partition(".")[0])
    _, path = local
    transport = library.HTTPTransport(uds=path)
    with (
        openai.DefaultHttpxClient(transport=transport) as http,
        openai.OpenAI(
            base_url="http://localhost/v1",
            api_key="-",
            http_client=http,
            max_retries=0,
            timeout=PATIENCE_S,
        ) as client,
    ):
        answering = answer_in_background(played, "a", "b")
        stream = client.completions.create(model="fake", prompt="x", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "ab"
        answering.join(PATIENCE_S)


def test_a_unix_socket_is_removed_and_what_a_dead_process_left_is_replaced(tmp_path):
    path = tmp_path / "http.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    first = Listeners.at_path(str(path))
    assert first.port is None
    with pytest.raises(OSError):
        Listeners.at_path(str(path))  # it is in use
    first.close()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(OSError):
        Listeners.at_path(str(path))
    assert path.read_text() == "mine"


# ---- request ids -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["abc-123", "x" * 128, "a/b:c=d"])
def test_a_request_id_comes_back(raw, given):
    for path in ("/version", "/v1/models"):
        assert raw.get(path, f"X-Request-Id: {given}").headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "\xe9"])
def test_one_is_made_where_there_is_none_that_can_be(raw, given):
    headers = () if given is None else (f"X-Request-Id: {given}",)
    found = [raw.get("/version", *headers).headers["x-request-id"] for _ in "ab"]
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in found)
    assert found[0] != found[1]


def test_a_refusal_and_a_stream_have_one(played, front):
    with Raw(front.port) as raw:
        raw.post("/v1/completions", {"prompt": "x", "stream": True}, "X-Request-Id: mine")
        handle = played.expect_and_accept()
        played.send(deltas(Entry(handle, "a", end=End("stop", 1))))
        assert raw.read().headers["x-request-id"] == "mine"
        assert raw.get("/nowhere", "X-Request-Id: mine").headers["x-request-id"] == "mine"


# ---- the access log ----------------------------------------------------------------------------


def test_an_access_log_in_json(worker):
    front = Front(worker.address, access_log="json", api_keys=("secret",))
    with Raw(front.port) as raw:
        assert raw.get("/health?key=hidden", "X-Request-Id: one").status == 200
        forwarded = ("X-Forwarded-For: 6.6.6.6, 203.0.113.7", "X-Forwarded-Proto: https")
        assert raw.get("/version", *forwarded).status == 200
        raw.post("/v1/completions", {"prompt": "x"}, "Authorization: Bearer secret")
        end = End("stop", 1)
        worker.send(deltas(Entry(worker.expect_and_accept(), "x", end=end)))
        assert raw.read().status == 200
        raw.send("nonsense\r\n\r\n")
        assert raw.read().status == 400
        raw.read_to_end()
    log = front.stop()
    lines = [json.loads(line) for line in log.splitlines()]
    assert [(line["method"], line["path"], line["status"]) for line in lines[:3]] == [
        ("GET", "/health", 200),
        ("GET", "/version", 200),
        ("POST", "/v1/completions", 200),
    ]
    assert lines[3]["status"] == 400
    assert lines[0]["request_id"] == "one"
    assert (lines[0]["client"], lines[0]["scheme"]) == ("127.0.0.1", "http")
    assert (lines[1]["client"], lines[1]["scheme"]) == ("203.0.113.7", "https")
    assert lines[0]["duration_ms"] >= 0
    assert "secret" not in log
    assert "hidden" not in log


def test_a_client_that_leaves_is_logged_with_its_address_and_its_request(worker):
    """It has left when the line is written: its socket has no address any more."""
    trusted = ("127.0.0.1", "unix")
    front = Front(worker.address, access_log="json", forwarded_allow_ips=trusted)
    with Raw(front.port) as raw:
        forwarded = "X-Forwarded-For: 203.0.113.7"
        raw.post("/v1/completions", {"prompt": "x"}, "X-Request-Id: mine", forwarded)
        submit = worker.expect(Submit)
        worker.accept(submit)
    assert worker.expect(Abort).stream_id == submit.stream_id
    [line] = [json.loads(line) for line in front.stop().splitlines()]
    assert (line["status"], line["request_id"], line["client"]) == (499, "mine", "203.0.113.7")


def test_the_log_says_that_tls_was_expected(worker, certificate):
    files = {"ssl_certfile": str(certificate.cert), "ssl_keyfile": str(certificate.key)}
    front = Front(worker.address, **files)
    for _ in range(5):
        with Raw(front.port) as plain:
            plain.send(GET + "\r\n")
            plain.read_to_end()
    with SecureRaw(front.port, certificate) as raw:
        assert raw.get("/version").status == 200
    lines = front.stop().splitlines()
    assert len(lines) == 3, lines  # the first, the second and the fourth
    assert all("WARNING no TLS connection with 127.0.0.1: " in line for line in lines)
    assert lines[0].endswith("HTTP without TLS; use https:// (1 time)")
    assert lines[2].endswith("(4 times)")


def test_an_access_log_for_people_believes_no_stranger(worker):
    front = Front(worker.address, access_log="text", forwarded_allow_ips=("10.0.0.0/8",))
    with Raw(front.port) as raw:
        assert raw.get("/version", "X-Forwarded-For: 203.0.113.7").status == 200
    [line] = front.stop().splitlines()
    assert " 127.0.0.1 GET /version 200 " in line


def test_nothing_is_logged_by_default(worker):
    front = Front(worker.address)
    with Raw(front.port) as raw:
        assert raw.get("/version").status == 200
    assert front.stop() == ""


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "client"),
    [
        (["127.0.0.1"], "127.0.0.1", ["1.2.3.4"], "1.2.3.4"),
        (["127.0.0.1"], "127.0.0.1", [], "127.0.0.1"),
        (["127.0.0.1"], "127.0.0.1", ["9.9.9.9, 1.2.3.4"], "1.2.3.4"),  # the client's own word
        (["127.0.0.1", "1.2.3.0/24"], "127.0.0.1", ["9.9.9.9, 1.2.3.4"], "9.9.9.9"),
        (["127.0.0.1"], "::ffff:127.0.0.1", ["1.2.3.4"], "1.2.3.4"),
        (["127.0.0.1"], "5.6.7.8", ["1.2.3.4"], "5.6.7.8"),
        (["127.0.0.1"], "127.0.0.1", ["nonsense"], "127.0.0.1"),
        (["127.0.0.1"], "127.0.0.1", ["9.9.9.9", "1.2.3.4"], "1.2.3.4"),
        (["unix"], "unix", ["1.2.3.4"], "1.2.3.4"),
        ([], "unix", ["1.2.3.4"], "unix"),
        (["*"], "5.6.7.8", ["9.9.9.9, 1.2.3.4"], "9.9.9.9"),
    ],
)
def test_whom_a_proxy_stands_for(trusted, peer, forwarded, client):
    assert TrustedProxies(trusted).client(peer, forwarded) == client


# ---- options -----------------------------------------------------------------------------------


def test_the_options_reach_the_fronts(tmp_path, certificate):
    options = {
        "uds": str(tmp_path / "s"),
        "ssl_certfile": str(certificate.cert),
        "ssl_keyfile": str(certificate.key),
        "access_log": "json",
        "forwarded_allow_ips": "10.0.0.0/8, unix",
    }
    plan = plan_stack(settings_from(options), tmp_path)
    assert (plan.listen, plan.uds) == (None, str(tmp_path / "s"))
    told = json.loads(bytes(plan.children[-1].config))
    assert {name: told[name] for name in options} == {
        **options,
        "forwarded_allow_ips": ["10.0.0.0/8", "unix"],
    }


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"uds": "/x", "http_port": 0}, "uds"),
        ({"ssl_certfile": "/x"}, "ssl_certfile"),
        ({"http_port": 0, "ssl_certfile": "/nowhere"}, "ssl_certfile"),
        ({"http_port": 0, "ssl_keyfile": "/nowhere"}, "ssl_keyfile"),
        ({"http_port": 0, "forwarded_allow_ips": "10.0.0.0/99"}, "forwarded_allow_ips"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, field):
    with pytest.raises(BadRequestError) as caught:
        plan_stack(settings_from(options), tmp_path)
    assert caught.value.field == field
