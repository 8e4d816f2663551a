"""A systemd unit's settings, and a program that runs a command under those that restrict it.

`python systemd_unit.py UNIT FOLDER COMMAND ...` applies system call filter, capabilities, umask and
file limit as systemd does, and lets the command write to FOLDER alone where it may mount. Not
applied: device access, other users' processes, namespaces made by clone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_MDWE = 23, 24, 38, 65
_CLONE_NEWNS, _MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    0x20000,
    1,
    32,
    4096,
    16384,
    1 << 18,
)
_ALLOW, _ERRNO, _EQ = 0x7FFF0000, 0x00050000, 4  # of libseccomp
_libc = ctypes.CDLL(None, use_errno=True)


class _Compare(ctypes.Structure):
    _fields_ = [
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    ]


def read_unit(path: Path) -> dict[str, list[str]]:
    """The values of each setting, in their order; sections are not told apart."""
    settings = defaultdict(list)
    for line in path.read_text().splitlines():
        if line and line[0] not in "#;[":
            name, _, value = line.partition("=")
            settings[name].append(value)
    return dict(settings)


def allowed_calls(settings: dict[str, list[str]]) -> set[str]:
    """The system calls that a unit's filter allows, by name. Needs systemd-analyze."""
    listing = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    groups: dict[str, list[str]] = {}
    for line in listing.splitlines():
        if line.startswith("@"):
            members = groups.setdefault(line.strip(), [])
        elif line.startswith("    ") and not line.strip().startswith("#"):
            members.append(line.strip())

    def expand(name: str) -> Iterator[str]:
        if name.startswith("@"):
            for each in groups[name]:
                yield from expand(each)
        else:
            yield name

    allowed = set(expand("@default"))
    for value in settings["SystemCallFilter"]:
        names = {call for name in value.lstrip("~").split() for call in expand(name)}
        allowed = allowed - names if value.startswith("~") else allowed | names
    return allowed | set(expand("@default"))


def _filter_calls(settings: dict[str, list[str]]) -> None:
    seccomp = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(
        seccomp.seccomp_init(_ERRNO | getattr(errno, settings["SystemCallErrorNumber"][-1]))
    )

    def rule(action: int, name: str, *compare: _Compare) -> None:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number != -1:  # not a call of this kernel's
            array = (_Compare * len(compare))(*compare)
            code = seccomp.seccomp_rule_add_array(context, action, number, len(compare), array)
            assert code in (0, -errno.EACCES), (name, code)  # EACCES: the default action

    plain = allowed_calls(settings) - {"socket", "clone3", "unshare", "setns"}
    for name in sorted(plain):
        rule(_ALLOW, name)
    rule(_ERRNO | errno.ENOSYS, "clone3")  # as RestrictNamespaces= does
    for family in settings["RestrictAddressFamilies"][-1].split():
        rule(_ALLOW, "socket", _Compare(0, _EQ, getattr(socket, family), 0))
    assert seccomp.seccomp_load(context) == 0


def _protect_files(folder: str) -> None:
    """Make everything but `folder` read-only, where this process may mount."""
    if _libc.unshare(_CLONE_NEWNS) != 0:
        return
    for source, target, flags in (
        (None, b"/", _MS_REC | _MS_PRIVATE),
        (os.fsencode(folder), os.fsencode(folder), _MS_BIND),
        (None, b"/", _MS_REMOUNT | _MS_BIND | _MS_RDONLY),
    ):
        code = _libc.mount(source, target, None, flags, None)
        assert code == 0, os.strerror(ctypes.get_errno())


def main(unit: str, folder: str, *command: str) -> None:
    """Restrict this process, then become the command."""
    settings = read_unit(Path(unit))
    limit = int(settings["LimitNOFILE"][-1])
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    os.umask(int(settings["UMask"][-1], 8))
    _protect_files(folder)
    assert settings["CapabilityBoundingSet"] == [""]
    number = 0
    while _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) >= 0:
        if os.geteuid() == 0:
            assert _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0
        number += 1
    if settings.get("MemoryDenyWriteExecute") == ["yes"]:
        assert _libc.prctl(_PR_SET_MDWE, 1, 0, 0, 0) == 0
    assert _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    _filter_calls(settings)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
