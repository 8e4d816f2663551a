"""Where ranks of several machines meet: nothing listens but at the address that was named."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest
from tests.helpers.patience import PATIENCE_S

from slipstream_core.ranks.meeting import NetworkMeeting

HOST = "127.0.0.2"  # torch's own choice would include 127.0.0.1


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


def test_the_store_listens_at_one_address_and_takes_no_harm_from_garbage() -> None:
    before = listening()
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        meeting = NetworkMeeting(HOST, port)
        store = meeting.store(PATIENCE_S, server)
    assert listening() - before == {(HOST, port)}
    other = meeting.store(PATIENCE_S)
    for size in (0, 1, 64, 1 << 16):
        with socket.create_connection((HOST, port)) as raw:
            raw.sendall(secrets.token_bytes(size))
    other.set("key", "value")
    store.wait(["key"], timedelta(seconds=PATIENCE_S))
    assert store.get("key") == b"value"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_interface_is_the_one_that_leads_there(host: str) -> None:
    if ":" in host and "::1" not in {
        each.address for found in psutil.net_if_addrs().values() for each in found
    }:
        pytest.skip("this machine has no IPv6")
    assert NetworkMeeting(host, 1).interface == "lo"


def test_other_ranks_of_the_machine_are_told_in_memory() -> None:
    fd = os.memfd_create("meeting")
    try:
        NetworkMeeting("::1", 29501).tell(fd)
        assert NetworkMeeting.told(fd) == NetworkMeeting("::1", 29501)
    finally:
        os.close(fd)


def test_a_store_that_is_let_go_late_finds_its_file() -> None:
    """torch opens the file once more then, and else ends the process."""
    program = """
import os, socket
from slipstream_core.ranks.meeting import LocalMeeting
fd = os.memfd_create("meeting")
store = LocalMeeting(fd, None).store(1)
store.set("key", "value")
os.close(fd)
other = socket.socket()  # has its number
assert other.fileno() == fd
del store
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)
