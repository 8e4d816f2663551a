"""The live page's files, as the front serves them."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import pytest
from tests.helpers.http_front import Front, Raw

from slipstream.http.admin.static import matches_etag, page_handlers

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
FOLDER = Path(str(files("slipstream.http").joinpath("page")))
FILES = {
    "/" if entry.name == "index.html" else f"/page/{entry.relative_to(FOLDER)}": entry
    for entry in FOLDER.rglob("*")
    if entry.is_file()
}
OURS = {path: entry for path, entry in FILES.items() if entry.parent.name != "vendor"}
PATHS = sorted(FILES)


def test_every_file_has_a_path():
    assert sorted(page_handlers()) == PATHS
    assert {"/", "/page/page.css", "/page/page.js"} <= FILES.keys()


@pytest.mark.parametrize("path", PATHS)
def test_a_file_comes_as_it_is(raw, path):
    answer = raw.get(path)
    assert answer.status == 200
    assert answer.body == FILES[path].read_bytes()
    assert answer.headers["content-type"] == KINDS[FILES[path].name.rpartition(".")[2]]
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert "require-trusted-types-for 'script'" in answer.headers["content-security-policy"]
    assert answer.headers["x-dns-prefetch-control"] == "off"


@pytest.mark.parametrize("path", PATHS)
def test_what_a_browser_has_is_not_sent_again(raw, path):
    tag = raw.get(path).headers["etag"]
    for given in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        raw.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: {given}\r\n\r\n")
        answer = raw.read(with_body=False)
        assert answer.status == 304
        assert answer.headers["etag"] == tag
        assert answer.headers["cache-control"] == "no-cache"
    # nothing of a body came behind it: the next answer is read where that one ended
    assert raw.get(path, 'If-None-Match: "other"').status == 200


def test_head_tells_the_same_without_the_file(raw):
    whole = raw.get("/")
    raw.send("HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head = raw.read(with_body=False)
    assert head.status == 200
    own = {"date": "", "x-request-id": ""}
    assert {**head.headers, **own} == {**whole.headers, **own}
    assert raw.get("/version").status == 200


def test_files_are_only_read(raw):
    raw.post("/", {})
    answer = raw.read()
    assert answer.status == 405
    assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize("path", ["/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page"])
def test_nothing_else_is_served(raw, path):
    assert raw.get(path).status == 404


def test_who_has_no_key_may_see_the_page_and_its_numbers_and_no_more(played):
    front = Front(played.address, api_keys=("secret",))
    try:
        with Raw(front.port) as raw:
            assert all(raw.get(path).status == 200 for path in (*PATHS, "/live"))
            assert raw.get("/v1/models").status == 401
    finally:
        front.stop()


def test_the_page_holds_nothing_inline_and_refers_to_what_is_there():
    page = FILES["/"].read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", page) == []
    for path in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert path in FILES or path in ("/health", "/live"), path
    for path, entry in OURS.items():
        text = entry.read_text()
        for name in re.findall(r'^import .*"(.+)";$', text, re.MULTILINE):
            assert (entry.parent / name).resolve() in FILES.values(), (path, name)
        assert set(re.findall(r"https?://[^\"']*", text)) <= {"http://www.w3.org/2000/svg"}, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text), path


def test_what_others_wrote_is_as_they_published_it_and_has_its_licence():
    vendor = FOLDER / "vendor"
    told = (vendor / "LICENSES.txt").read_text()
    entries = re.findall(
        r"^file: (\S+)\nsha256: (\w+)\nversion: (\S+) (\S+)\nfrom: .+\nlicence: .+$",
        told,
        re.MULTILINE,
    )
    assert {name for name, *_ in entries} | {"LICENSES.txt"} == {
        each.name for each in vendor.iterdir()
    }
    for name, digest, library, version in entries:
        content = (vendor / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, name
        assert f"{library} {version} ".encode() in content[:200], name
        assert f"---- {library} ----\n\nCopyright" in told


def test_tags_are_compared_weakly():
    assert matches_etag(b'"a"', b'"b" , W/"a"')
    assert not matches_etag(b'"a"', b"")
    assert not matches_etag(b'"a"', b'"ab", "*"')


def test_live_tells_who_is_there_before_anybody_told_numbers(raw):
    live = raw.get("/live").json
    assert live["running"] is None
    assert live["ttft_s"] == {"num": 0, "p50": None, "p99": None}
    assert live["timeline"] == {"span_us": 1_000_000, "steps": [], "work": []}
