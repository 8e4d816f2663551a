"""Server addresses: defaults, the form of HTTP addresses, and the keys that an address needs."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

from slipstream.client.placing.discovery import member_source, names_fleet
from slipstream.errors import ConnectionLostError, bad_request
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import Fault
from slipstream_ipc.transport.addresses import (
    IPC,
    TCP,
    check_listen_address,
    check_server_address,
    check_socket_folder,
)
from slipstream_ipc.transport.curve import Access, keys_for, load_client_keys, load_server_keys

ADDRESS_VARIABLE = "SLIPSTREAM_ADDRESS"
KEYS_VARIABLE = "SLIPSTREAM_KEYS"
LOCK_NAME = "supervisor.lock"  # in the runtime directory of a stack; holds the supervisor's pid
UNIX = "unix:"
_REPLICA = "replica-"  # the folders of replicas in a server's runtime directory
_SERVING = "serving on "


def default_runtime_dir() -> Path:
    """The default runtime directory of a stack: one for each user of the machine.

    $XDG_RUNTIME_DIR counts where it is absolute, as its specification has it: clients may be
    started in another folder than the server.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isabs(base):
        base = "/tmp"  # noqa: S108  (the folder below has the uid in its name)
    return Path(base) / f"slipstream-{os.getuid()}" / "default"


def client_address(runtime_dir: Path) -> str:
    """The client address of a stack in `runtime_dir`."""
    return f"ipc://{runtime_dir}/client.sock"


def http_address(host: str, port: int, *, uds: str | None = None, has_tls: bool = False) -> str:
    """The address of an HTTP front: the start of a URL, or `unix:PATH`."""
    if uds is not None:
        return f"{UNIX}{uds}"
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if has_tls else 'http'}://{shown}:{port}"


def http_detail(address: str) -> str:
    """The detail that the front at this address reports when it is ready."""
    return f"{_SERVING}{address}"


def http_address_in(detail: str) -> str:
    """The address in the detail that a front reports; the inverse of `http_detail`."""
    return detail.removeprefix(_SERVING)


def default_address() -> str:
    """The address of a client that is given none: $SLIPSTREAM_ADDRESS, else that of this user's
    server, which may have replicas.
    """
    return os.environ.get(ADDRESS_VARIABLE) or address_in(default_runtime_dir())


def address_in(runtime_dir: Path) -> str:
    """The address of the server in this folder: of its replicas, where it has any, else its own."""
    own = client_address(runtime_dir)
    if Path(own.removeprefix(IPC)).exists():
        return own
    return ",".join(map(client_address, replica_folders(runtime_dir))) or own


def replica_folders(runtime_dir: Path) -> list[Path]:
    """The runtime directories of a server's replicas, in their order; empty: it has none."""
    found = [path for path in runtime_dir.glob(f"{_REPLICA}*") if _number_of(path).isdecimal()]
    return sorted(found, key=lambda path: int(_number_of(path)))


def _number_of(replica: Path) -> str:
    return replica.name.removeprefix(_REPLICA)


class ServerEndpoint(NamedTuple):
    """A server's address, and the keys to connect with; `access` is None where none are needed."""

    address: str
    access: Access | None = None


def server_endpoint(
    address: str | None = None,
    keys: str | os.PathLike[str] | None = None,
    *,
    insecure: bool = False,
) -> ServerEndpoint:
    """The server that a client connects to. Missing arguments come from the environment.

    keys: a folder made by `slipstream keys`, or a client's secret file in it.

    Raises: BadRequestError for an invalid address, tcp:// without keys, invalid keys, or a socket
    in a folder that is open to other users; ConnectionLostError for such a folder without a socket.
    """
    found = default_address() if address is None else address
    given = keys if keys is not None else os.environ.get(KEYS_VARIABLE) or None
    if keys is None and (insecure or not found.startswith(TCP)):
        given = None  # the environment's keys apply only where keys are required
    try:
        if names_fleet(found):
            return _fleet_endpoint(found, keys, insecure=insecure)
        check_server_address(found, has_keys=given is not None, insecure=insecure)
        check_socket_folder(found)
        if given is not None:
            keys_here = load_client_keys(Path(given).expanduser())
            return ServerEndpoint(found, access_to(found, Access(keys_here)))
    except BadRequest as error:
        raise bad_request(error) from None
    except OSError as error:
        if given is None and not _has_socket(found):  # a folder's mode is of no interest then
            why = f"no Slipstream server at {found}: there is no such socket"
            raise ConnectionLostError(Fault("engine", why)) from None
        field, value = ("keys", os.fspath(given)) if given is not None else ("address", found)
        raise bad_request(BadRequest(field, value, str(error))) from None
    return ServerEndpoint(found, Access(insecure=True) if insecure else None)


def _fleet_endpoint(
    address: str, keys: str | os.PathLike[str] | None, *, insecure: bool
) -> ServerEndpoint:
    """The members of a fleet, with the keys for those at tcp:// addresses. Raises: BadRequest."""
    has_tcp = TCP in address or not address.startswith(IPC)
    given = keys if keys is not None else os.environ.get(KEYS_VARIABLE) or None
    if keys is None and (insecure or not has_tcp):
        given = None
    access = Access(insecure=True) if insecure else None
    if given is not None:
        access = Access(load_client_keys(Path(given).expanduser()))
    member_source(address, partial(check_member, access=access))
    return ServerEndpoint(address, access)


def check_member(address: str, *, access: Access | None) -> None:
    """Check an address of a fleet's member. access: for tcp:// members. Raises: BadRequest."""
    is_tcp = address.startswith(TCP)
    has_keys = is_tcp and access is not None and access.keys is not None
    insecure = is_tcp and access is not None and access.insecure
    check_server_address(address, has_keys=has_keys, insecure=insecure)


def access_to(address: str, access: Access | None) -> Access | None:
    """The access to the server at this address: for tcp://, with the server's own public key where
    there is one. Raises: BadRequest, PermissionError, OSError.
    """
    if not address.startswith(TCP) or access is None:
        return None
    return access if access.keys is None else Access(keys_for(access.keys, address))


def _has_socket(address: str) -> bool:
    try:
        os.stat(address.removeprefix(IPC))
    except FileNotFoundError:
        return False
    except OSError:
        pass  # its folder cannot be looked into
    return True


def check_listener(listen: str | None, keys: str | None, *, insecure: bool) -> Path | None:
    """The folder of a server's keys, read once to check it; None where no keys are needed.

    Raises: BadRequestError.
    """
    try:
        if listen is None:
            for option, value in (("keys", keys), ("insecure", insecure or None)):
                if value is not None:
                    raise BadRequest(option, value, "only beside listen, a tcp:// address")
            return None
        check_listen_address(listen, has_keys=keys is not None, insecure=insecure)
        if keys is None:
            return None
        folder = Path(keys).expanduser().absolute()
        load_server_keys(folder)
        return folder
    except BadRequest as error:
        raise bad_request(error) from None
    except OSError as error:
        raise bad_request(BadRequest("keys", keys, str(error))) from None
