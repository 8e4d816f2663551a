"""Pages of other sites that reach this machine under a name of theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.http_front import Front, Raw

from slipstream.errors import BadRequestError
from slipstream.http.exchange import HttpRequest
from slipstream.http.server.hosts import Hosts, hosts_of
from slipstream.loopback import is_loopback
from slipstream.stack.plan.front_plan import allowed_hosts
from slipstream.stack.settings import settings_from

OWN = (
    "localhost",
    "localhost:8000",
    "LOCALHOST:8000",
    "localhost.",
    "slipstream.localhost:1",
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.1.2.3:80",
    "[::1]",
    "[::1]:8000",
    "[::ffff:127.0.0.1]:80",
)
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1.nip.io:8000",
    "evillocalhost",
    "localhost@evil.example",
    "192.168.0.7:8000",
    "0.0.0.0:8000",
    "[::2]:8000",
    "[::1",
    "[::1]evil.example",
    "::1",
    "localhost:80:80",
    "2130706433",
    "",
    " ",
    "\xe9vil",
)


def asks(host: str | None, origin: str | None = None) -> HttpRequest:
    headers = {} if host is None else {b"host": host.encode("latin-1")}
    if origin is not None:
        headers[b"origin"] = origin.encode("latin-1")
    return HttpRequest("GET", "/", headers=headers)


def test_a_server_of_loopback_has_names_of_loopback():
    hosts = hosts_of("127.0.0.1", has_keys=False, allowed=(), origins=())
    for host in OWN:
        assert hosts.check(asks(host)) is None, host
    for host in FOREIGN:
        refusal = hosts.check(asks(host))
        assert refusal is not None, host
        assert refusal.status == 403
        assert str(refusal).startswith("Host: got ")
    assert hosts.check(asks(None)) is None  # a browser always says one
    assert len(str(hosts.check(asks("x" * 60_000)))) < 400


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.9"])
def test_keys_or_a_network_open_it(host):
    evil = asks("evil.example")
    assert hosts_of(host, has_keys=False, allowed=(), origins=()).check(evil) is not None
    assert hosts_of(host, has_keys=True, allowed=(), origins=()).check(evil) is None
    for wide in ("0.0.0.0", "::", "192.168.0.7", "server.example"):
        assert hosts_of(wide, has_keys=False, allowed=(), origins=()).check(evil) is None
        given = hosts_of(wide, has_keys=True, allowed=("server.example",), origins=())
        assert given.check(evil) is not None
        assert given.check(asks("Server.Example:443")) is None
        assert given.check(asks("localhost")) is None


def test_what_is_allowed_besides():
    hosts = Hosts(("proxy.example", "*.tailnet.example", "fd00::7"))
    for name in ("proxy.example", "PROXY.example.:80", "a.b.tailnet.example:1", "[FD00::7]:1"):
        assert hosts.check(asks(name)) is None, name
    for name in ("a.proxy.example", "tailnet.example", "eviltailnet.example", "proxy.example.evil"):
        assert hosts.check(asks(name)) is not None, name
    assert Hosts(("*",)).check(asks("evil.example")) is None


@given(st.text(st.characters(max_codepoint=255), max_size=40))
def test_no_host_raises_anything(host):
    hosts = Hosts(("*.example",))
    assert hosts.check(asks(host)) is None or hosts.check(asks(host)).status == 403
    is_loopback(host)


def test_the_live_page_is_its_own():
    hosts = Hosts((), ("https://app.example",))
    for host, origin in (
        ("localhost:8000", None),
        ("localhost:8000", "http://localhost:8000"),
        ("proxy.example", "https://proxy.example"),
        ("localhost:8000", "https://app.example"),
    ):
        assert hosts.check_origin(asks(host, origin)) is None, origin
    for origin in ("https://evil.example", "http://localhost:8001", "null", "", "localhost:8000"):
        refusal = hosts.check_origin(asks("localhost:8000", origin))
        assert refusal is not None, origin
        assert (refusal.status, str(refusal)[:8]) == (403, "Origin: ")
    assert Hosts((), ("*",)).check_origin(asks("localhost", "null")) is None


def test_the_option():
    given = ["proxy.example", "*.example", "fd00::1", "my_service", "*", "10.0.0.1"]
    assert allowed_hosts(settings_from({"allowed_hosts": given})) == tuple(given)
    assert allowed_hosts(settings_from({"allowed_hosts": "one"})) == ("one",)
    for wrong in ("", "a:80", "http://a", "a b", "a\r\nb", "*a", "a.*", "[::1]"):
        with pytest.raises(BadRequestError, match="allowed_hosts: got"):
            allowed_hosts(settings_from({"allowed_hosts": wrong}))


def ask(raw: Raw, head: str, *headers: str) -> int:
    raw.send("\r\n".join([head, *headers, "\r\n"]))
    answer = raw.read(with_body=not head.startswith("HEAD"))
    if answer.status == 403:
        assert answer.headers["connection"] == "close"
    return answer.status


@pytest.mark.parametrize(
    "head",
    [
        "GET /live HTTP/1.1",
        "GET / HTTP/1.1",
        "GET /health HTTP/1.1",
        "HEAD /metrics HTTP/1.1",
        "OPTIONS /v1/models HTTP/1.1",
        "GET /nowhere HTTP/1.1",
        "POST /v1/completions HTTP/1.1",
    ],
)
def test_whatever_is_asked_of_a_server_under_another_name_is_refused(front, head):
    with Raw(front.port) as raw:
        assert ask(raw, head, "Host: evil.example:8000") == 403


def test_a_page_of_another_origin_is_told_no_numbers(front):
    with Raw(front.port) as raw:
        own = "Origin: http://localhost:8000"
        assert ask(raw, "GET /live HTTP/1.1", "Host: localhost:8000", own) == 200
        assert ask(raw, "GET /live HTTP/1.1", "Host: localhost:8000", "Origin: http://e.org") == 403
    with Raw(front.port) as raw:
        assert ask(raw, "GET /health HTTP/1.1", "Host: localhost", "Origin: http://e.org") == 200
        assert ask(raw, "GET /live HTTP/1.0") == 200


@pytest.fixture
def keyed(worker: FakeWorker) -> Iterator[Front]:
    front = Front(worker.address, api_keys=("key",))
    yield front
    front.stop()


def test_a_server_with_keys_goes_by_any_name(keyed):
    with Raw(keyed.port) as raw:
        assert ask(raw, "GET /health HTTP/1.1", "Host: any.example") == 200
        assert ask(raw, "GET /v1/models HTTP/1.1", "Host: any.example") == 401
