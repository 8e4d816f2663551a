"""Keys and certificates that change while a front runs."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.certificates import Certificate

from slipstream.errors import BadRequestError
from slipstream.http.config import FrontConfig
from slipstream.http.credentials import Credentials


def credentials(**options: Any) -> Credentials:
    return Credentials(FrontConfig("ipc:///nowhere", "", **options))


def write(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file as editors and Kubernetes do: by another one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)


def accepts(found: Credentials, *keys: str) -> list[bool]:
    return [found.keys.check({b"x-api-key": key.encode()}) is None for key in keys]


def test_a_file_of_keys_is_read_anew_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    write(path, "one\ntwo\n")
    found = credentials(api_keys=("listed",), api_key_file=str(path))
    assert accepts(found, "listed", "one", "two", "new", "") == [True, True, True, False, False]
    write(path, "two\nnew\n")
    assert accepts(found, "one", "new") == [True, False], "until the next look"
    found.look()
    assert accepts(found, "listed", "one", "two", "new") == [True, False, True, True]
    assert "two" not in caplog.text


@pytest.mark.parametrize("wrong", ["", "\n", "se cret\n", None])
def test_a_file_of_keys_that_cannot_be_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str | None
) -> None:
    """Nor does one that others can read. It is said once, and read as soon as it can be."""
    path = tmp_path / "keys"
    write(path, "one\n")
    found = credentials(api_key_file=str(path))
    if wrong is None:
        path.unlink()
    else:
        write(path, wrong)
    for _ in range(3):
        found.look()
    assert accepts(found, "one", "new", "") == [True, False, False]
    write(path, "new\n", 0o644)
    for _ in range(3):
        found.look()
    assert accepts(found, "one", "new") == [True, False]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "se cret" not in caplog.text
    path.chmod(0o600)
    found.look()
    assert accepts(found, "one", "new") == [False, True]


def test_what_looks_unchanged_is_read_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems do not tell: SIGHUP does."""
    path = tmp_path / "keys"
    write(path, "one\n")
    same = os.stat(path)
    monkeypatch.setattr("slipstream.http.credentials._state_of", lambda _: tuple(same))
    found = credentials(api_key_file=str(path))
    write(path, "new\n")
    found.look()
    assert accepts(found, "one", "new") == [True, False]
    found.look(is_asked=True)
    assert accepts(found, "one", "new") == [False, True]


def test_keys_whose_priority_counts_change_with_them(tmp_path: Path) -> None:
    keys, priority = tmp_path / "keys", tmp_path / "priority"
    write(keys, "one\ntwo\n")
    write(priority, "one\n")
    found = credentials(api_key_file=str(keys), priority_key_file=str(priority))
    tenants = [found.keys.tenant({b"x-api-key": key}) for key in (b"one", b"two")]
    assert [found.keys.has_priority(each) for each in tenants] == [True, False]
    write(priority, "two\n")
    found.look()
    assert [found.keys.has_priority(each) for each in tenants] == [False, True]


def test_without_files_the_listed_keys_stay() -> None:
    found = credentials(api_keys=("listed",))
    found.look(is_asked=True)
    assert accepts(found, "listed", "one") == [True, False]


@pytest.mark.parametrize("together", [False, True])
def test_a_certificate_is_read_anew(tmp_path: Path, together: bool) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = Certificate(tmp_path / "old"), Certificate(tmp_path / "new")
    cert, key = tmp_path / "cert", tmp_path / "key"

    def put(certificate: Certificate) -> None:
        if together:
            write(cert, certificate.key.read_text() + certificate.cert.read_text())
        else:
            write(cert, certificate.cert.read_text(), 0o644)
            write(key, certificate.key.read_text())

    put(old)
    found = credentials(ssl_certfile=str(cert), ssl_keyfile=None if together else str(key))
    used: list[ssl.SSLContext] = []
    found.on_certificate(used.append)
    found.look()
    assert used == []
    if not together:
        write(cert, new.cert.read_text(), 0o644)  # its key comes later
        found.look()
        assert used == []
    put(new)
    found.look()
    assert used == [found.tls]
    found.look()
    assert len(used) == 1
    found.look(is_asked=True)
    assert len(used) == 2


def test_what_cannot_be_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="api_key_file"):
        credentials(api_key_file=str(tmp_path / "none"))
    with pytest.raises(OSError, match="none"):
        credentials(ssl_certfile=str(tmp_path / "none"))
