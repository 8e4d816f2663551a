"""Checks socket addresses and the folders of ipc:// sockets, and shortens secret ids for logs.

- An ipc:// socket is as private as its folder, which belongs to the user with mode 0700. The mode
  of the socket file does not matter, as some systems ignore it.
- A tcp:// address names its host. Without keys it has to be a loopback address and needs the
  explicit option `insecure`, because every user of the machine can connect to it.
- A stream id or a client's identity gives access to what it names, so neither is ever logged.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path

from slipstream_ipc.errors import BadRequest

IPC = "ipc://"
TCP = "tcp://"

_MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 107
_LOCALHOST = "localhost"


# ---- folders of sockets ----------------------------------------------------------------------


def check_private(folder: Path) -> None:
    """Check that the folder belongs to this user and that no other user may enter it.

    Raises: PermissionError if not; FileNotFoundError if it does not exist.
    """
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid == os.getuid():
        status = folder.stat()
    if status.st_uid != os.getuid():
        why = f"it belongs to user {status.st_uid}, this process to user {os.getuid()}"
    elif not stat.S_ISDIR(status.st_mode):
        why = "it is not a folder"
    elif status.st_mode & 0o077:
        why = f"its mode is {stat.S_IMODE(status.st_mode):04o}, so others may enter it"
    else:
        return
    raise PermissionError(
        f"{folder}: {why}; the sockets' folder must belong to the user, with mode 0700 "
        "(`chmod 700` where it is yours)"
    )


def check_unmovable(folder: Path) -> None:
    """Check that no other user may rename or replace what lies in this folder: it is root's or this
    user's, and others may write to it at most where it is sticky, as /tmp is.

    Raises: PermissionError if not; FileNotFoundError if it does not exist.
    """
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()):
        why = f"it belongs to user {status.st_uid}"
    elif status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        why = f"its mode is {stat.S_IMODE(status.st_mode):04o}, so others may rename what is in it"
    else:
        return
    raise PermissionError(
        f"{folder}: {why}; what the sockets' folder lies in must belong to the user or root, with "
        "mode 0755 or 1777 at most (another one by XDG_RUNTIME_DIR or --runtime-dir)"
    )


def check_socket_folder(address: str) -> None:
    """Raise PermissionError if other users may enter the folder of an ipc:// address.

    A folder that does not exist yet passes, and so do addresses of other kinds.
    """
    if address.startswith(IPC):
        try:
            check_private(Path(address.removeprefix(IPC)).parent)
        except FileNotFoundError:
            return


# ---- addresses -------------------------------------------------------------------------------


def check_ipc_address(address: str) -> str:
    """Return the address if it is an ipc:// one whose path fits a Unix socket.

    Raises: BadRequest.
    """
    if not address.startswith(IPC + "/"):
        raise BadRequest("address", address, "ipc:// and an absolute path")
    if len(os.fsencode(address)) - len(IPC) > _MAX_SOCKET_PATH_BYTES:
        raise BadRequest("address", address, f"at most {_MAX_SOCKET_PATH_BYTES} bytes of path")
    return address


def check_listen_address(address: str, *, has_keys: bool, insecure: bool) -> str:
    """Return the address if a server may listen at it.

    Its host has to be an IP address: what a name resolves to can change. Raises: BadRequest.
    """
    host = _host("listen", address)
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        allowed = (
            "tcp://ADDRESS:PORT, where ADDRESS is one of this machine's (127.0.0.1, [::1], ...)"
        )
        raise BadRequest("listen", address, allowed) from None
    _check_secrecy("listen", address, ip.is_loopback, has_keys=has_keys, insecure=insecure)
    return address


def check_server_address(address: str, *, has_keys: bool, insecure: bool) -> str:
    """Return the address if a client may connect to it. Raises: BadRequest."""
    if not address.startswith(TCP):
        if has_keys or insecure:
            option = "keys" if has_keys else "insecure"
            raise BadRequest(option, address, "only with a tcp:// address; ipc:// needs none")
        if not address.startswith(IPC):
            allowed = "ipc:///PATH or tcp://HOST:PORT"
            if address.startswith(("http://", "https://")):
                allowed += (
                    "; this is the address for HTTP clients. For your server on this machine leave "
                    "it out"
                )
            raise BadRequest("address", address, allowed)
        return check_ipc_address(address)
    host = _host("address", address)
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == _LOCALHOST
    _check_secrecy("address", address, is_local, has_keys=has_keys, insecure=insecure)
    return address


def is_ipv6(address: str) -> bool:
    """True if the host of a tcp:// address is an IPv6 address."""
    return address.startswith(TCP + "[")


def host_of(address: str) -> str:
    """The host of a tcp:// address, without brackets. Raises: BadRequest."""
    return _host("address", address)


def _host(field: str, address: str) -> str:
    allowed = "tcp://HOST:PORT, with a port from 1 to 65535"
    host, colon, port = address.removeprefix(TCP).rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not address.startswith(TCP) or not colon or not (port.isascii() and port.isdigit()):
        raise BadRequest(field, address, allowed)
    if not 0 < int(port[:6]) < 2**16 or (":" in host) != is_bracketed:
        raise BadRequest(field, address, allowed)
    host = host[1:-1] if is_bracketed else host
    if not host or not host.isascii() or not all(c.isalnum() or c in "-_.:" for c in host):
        raise BadRequest(field, address, allowed)
    return host


def _check_secrecy(
    field: str, address: str, is_local: bool, *, has_keys: bool, insecure: bool
) -> None:
    if has_keys and insecure:
        raise BadRequest("insecure", insecure, "keys or insecure, not both")
    if has_keys:
        return
    if not insecure:
        raise BadRequest(
            field,
            address,
            "tcp:// with keys (`slipstream keys DIR` makes them); or, on this machine alone and "
            "open to all of its users, insecure",
        )
    if not is_local:
        raise BadRequest("insecure", address, "a loopback address; others need keys")
