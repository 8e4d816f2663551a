"""Sources of the addresses of a fleet's members: a list, a file that may change, a DNS name, a
fleet on Ray, or a server's answer.

A source is asked for the addresses regularly. It never blocks: a name is resolved in a thread, one
at a time, and Ray is asked by another process. Where a source fails it keeps to what it said
before, so that a fault of the list is no fault of the fleet. A fault is logged once, however often
it comes again.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import os
import re
import socket
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from slipstream.client.placing.member_feed import MemberFeed
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.telemetry.recent_warnings import RecentWarnings
from slipstream_ipc.transport.addresses import IPC, TCP

MAX_MEMBERS = 64
FILE = "file:"
DNS = "dns://"
RAY = "ray://"
FLEET_NAME = "[A-Za-z0-9][A-Za-z0-9_-]{0,63}"  # of a fleet on Ray
_ASK_EVERY_S = 5.0  # a name server
_MAX_FILE_BYTES = 64 * 1024
_FILE_FORM = "file:PATH of a file with an address to a line"
_ASK_RAY = (sys.executable, "-P", "-m", "slipstream_ray.member_watch")
INSTALL_RAY = "pip install 'slipstream[ray]'"

Check = Callable[[str], None]
Resolve = Callable[[str, int], Sequence[str]]

logger = logging.getLogger(__name__)


class MemberSource(Protocol):
    """Says where the members of a fleet are."""

    def addresses(self, now: float) -> tuple[str, ...]:
        """The addresses, without repetitions; empty while none are known."""

    @property
    def is_beginning(self) -> bool:
        """True if no member is known yet because the source of members is still starting."""
        return False

    def close(self) -> None:
        """End what the source has begun. It is asked for nothing more."""
        return  # most have begun nothing


def names_fleet(address: str) -> bool:
    """True if an address names several members."""
    return "," in address or address.startswith((FILE, DNS, RAY))


def member_source(address: str, check: Check) -> MemberSource:
    """The source that an address names: addresses separated by commas, `file:PATH` with an address
    to a line, `dns://NAME:PORT`, or `ray://NAME` of a fleet that `slipstream ray up` has started.

    check: raises BadRequest for an address that may not be connected to.

    Raises: BadRequest.
    """
    if address.startswith(DNS):
        return DnsMembers(address, check)
    if address.startswith(RAY):
        return RayMembers(address, check)
    if address.startswith(FILE):
        return FileMembers(Path(address.removeprefix(FILE)).expanduser(), check)
    return ListedMembers(checked_members([each.strip() for each in address.split(",")], check))


class ListedMembers(MemberSource):
    """Members that do not change."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)

    def addresses(self, now: float) -> tuple[str, ...]:
        """See `MemberSource`."""
        return self._addresses


class LearnedMembers(MemberSource):
    """Members that a server names: those whose addresses are of the same kind as the server's own,
    and may be connected to.
    """

    def __init__(self, address: str, check: Check) -> None:
        """address: the server's own."""
        self._kind = IPC if address.startswith(IPC) else TCP
        self._check = check
        self._addresses: tuple[str, ...] = ()

    def learn(self, addresses: Sequence[str]) -> None:
        """A server has named these. Where none of them is of use, nothing changes."""
        found = [each for each in dict.fromkeys(addresses) if each.startswith(self._kind)]
        usable = [each for each in found[:MAX_MEMBERS] if self._is_usable(each)]
        self._addresses = tuple(usable) or self._addresses

    def addresses(self, now: float) -> tuple[str, ...]:
        """See `MemberSource`."""
        return self._addresses

    def _is_usable(self, address: str) -> bool:
        try:
            self._check(address)
        except BadRequest as error:
            logger.warning(
                "a server names %s as a replica, which is not usable: %s", address, error
            )
            return False
        return True


class FileMembers(MemberSource):
    """Members in a file, read again when it changes. `#` begins a comment. One that becomes empty
    changes nothing.
    """

    def __init__(self, path: Path, check: Check) -> None:
        """Raises: BadRequest where the file cannot be read or an address is not allowed."""
        self._path = path
        self._check = check
        self._warnings = RecentWarnings(logger)
        try:
            self._version = self._look()
            self._addresses = self._read()
        except OSError as error:
            allowed = f"{_FILE_FORM}, which can be read ({error.strerror})"
            raise BadRequest("address", f"{FILE}{path}", allowed) from None

    def addresses(self, now: float) -> tuple[str, ...]:
        """See `MemberSource`."""
        try:
            version = self._look()
            if version != self._version:
                self._version = version
                # it is empty while it is written in place
                self._addresses = self._read() or self._addresses
                self._warnings.forget()
        except (BadRequest, OSError) as error:
            self._warnings.warn("the members in %s stay as they were: %s", self._path, error)
            self._version = None
        return self._addresses

    def _look(self) -> tuple[int, int, int] | None:
        status = os.stat(self._path)
        if not stat.S_ISREG(status.st_mode):  # one of another kind may never end
            raise BadRequest("address", f"{FILE}{self._path}", f"{_FILE_FORM}, not of another kind")
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> tuple[str, ...]:
        with self._path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:  # its last line would be a part of an address
            allowed = f"{_FILE_FORM}, of at most {_MAX_FILE_BYTES} bytes"
            raise BadRequest("address", f"{FILE}{self._path}", allowed)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise BadRequest("address", f"{FILE}{self._path}", f"{_FILE_FORM}, in UTF-8") from None
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        return checked_members([line for line in lines if line], self._check)


class DnsMembers(MemberSource):
    """The members behind a name, which is resolved again every few seconds."""

    def __init__(self, address: str, check: Check, resolve: Resolve | None = None) -> None:
        """Raises: BadRequest."""
        host, _, port = address.removeprefix(DNS).rpartition(":")
        self._check = check
        self._resolve = resolve or _resolve
        if not (host and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
            raise BadRequest("address", address, "dns://NAME:PORT, with a port from 1 to 65535")
        check(f"{TCP}{host}:{port}")
        self._host, self._port = host, int(port)
        self._name = address
        self._warnings = RecentWarnings(logger)
        self._addresses: tuple[str, ...] = ()
        self._asked_at: float | None = None
        self._thread: threading.Thread | None = None

    def addresses(self, now: float) -> tuple[str, ...]:
        """See `MemberSource`."""
        is_asking = self._thread is not None and self._thread.is_alive()
        if not is_asking and (self._asked_at is None or now >= self._asked_at + _ASK_EVERY_S):
            self._asked_at = now
            thread = threading.Thread(target=self._ask, name="slipstream-dns", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there may be no more threads
                self._warn(error)
            else:
                self._thread = thread
        return self._addresses

    def _ask(self) -> None:
        try:
            hosts = sorted(set(self._resolve(self._host, self._port)))
            found = checked_members([_tcp_address(host, self._port) for host in hosts], self._check)
        except (BadRequest, OSError, UnicodeError) as error:
            self._warn(error)
            return
        self._warnings.forget()
        if found:
            self._addresses = found

    def _warn(self, error: Exception) -> None:
        self._warnings.warn("the members at %s stay as they were: %s", self._name, error)


class RayMembers(MemberSource):
    """The replicas of a fleet on Ray, by a process that asks for them: Ray ends a process that it
    cannot serve, and would take a front or a client with it.
    """

    def __init__(self, address: str, check: Check, command: Sequence[str] = _ASK_RAY) -> None:
        """command: of the process, without the name. Raises: BadRequest."""
        name = address.removeprefix(RAY)
        if not re.fullmatch(FLEET_NAME, name):
            allowed = "ray://NAME, with letters, digits, - and _ in the name"
            raise BadRequest("address", address, allowed)
        if command is _ASK_RAY and not has_ray():
            raise BadRequest("address", address, f"another one without Ray: {INSTALL_RAY}")
        self._check = check
        self._name = address
        self._warnings = RecentWarnings(logger)
        self._feed = MemberFeed([*command, name], self._take)
        self._addresses: tuple[str, ...] = ()

    def addresses(self, now: float) -> tuple[str, ...]:
        """See `MemberSource`."""
        self._feed.start()
        return self._addresses

    @property
    def is_beginning(self) -> bool:
        """See `MemberSource`."""
        return self._feed.is_beginning

    def close(self) -> None:
        """See `MemberSource`."""
        self._feed.close()

    def _take(self, said: Sequence[str] | str) -> None:
        """Take the addresses, or what is the matter, from the process."""
        try:
            found = () if isinstance(said, str) else checked_members(said, self._check)
            why = said if isinstance(said, str) else "it has none"
        except BadRequest as error:
            found, why = (), str(error)
        if found:
            self._addresses = found
            self._warnings.forget()
        else:
            self._warnings.warn("the members of %s stay as they were: %s", self._name, why)


def has_ray() -> bool:
    """True if Ray and slipstream-ray, which asks it, are installed; neither is imported. A folder
    of such a name is not a package.
    """
    specs = [importlib.util.find_spec(name) for name in ("ray", "slipstream_ray")]
    return all(spec is not None and spec.origin is not None for spec in specs)


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for _, _, _, _, sockaddr in found]


def _tcp_address(host: str, port: int) -> str:
    is_ipv6 = ipaddress.ip_address(host.partition("%")[0]).version == 6
    return f"{TCP}[{host}]:{port}" if is_ipv6 else f"{TCP}{host}:{port}"


def checked_members(addresses: Sequence[str], check: Check) -> tuple[str, ...]:
    """The addresses, without repetitions. Raises: BadRequest, also for too many."""
    found = tuple(dict.fromkeys(addresses))
    if len(found) > MAX_MEMBERS:
        allowed = f"at most {MAX_MEMBERS} members"
        raise BadRequest("address", f"{len(found)} members", allowed)
    for address in found:
        check(address)
    return found
