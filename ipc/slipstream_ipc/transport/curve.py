"""CURVE, ZeroMQ's encryption and authentication, for tcp:// sockets.

Reads the key files, sets a socket's keys, and runs the gate: a ZAP handler that admits the clients
whose public keys are in the server's folder. A folder of keys holds certificates in the format of
pyzmq and czmq:

    server.key           the server's public key      copied to each client
    server.key_secret    the server's secret key      never leaves the server
    NAME.key             a client's public key        admits that client
    NAME.front.key       a front's public key         admits a front, which names its own clients
    NAME.rank.key        a rank's public key          admits it to its core, and to nothing else
    NAME.key_secret      that client's secret key     stays with the client
    servers/HOST:PORT.key   the public key of the server at tcp://HOST:PORT, where it is another one

- CURVE alone admits every client that knows the server's public key. So there is always a gate, and
  with ZAP_ENFORCE_DOMAIN a socket refuses all clients if the gate fails.
- The gate reads the folder at each handshake: copying a public key there admits a client, and
  removing it refuses the client from its next attach on.
- Clients and fronts are let in where streams are read, ranks where plans are sent, and none where
  the others are.
- A secret file belongs to the user, mode 0600, or to root, mode 0640, as libpq has it: that is how
  Kubernetes mounts a Secret for a group. Only the user may write to the folder, or others could
  admit themselves. Secrets are never part of a repr, an error or a log.
- Each message of a client that was admitted carries its public key (`public_key_of`), by which it
  is a tenant. One of a front carries none: the front says on whose behalf it asks, as one on this
  machine does.
- CURVE protects against reading, changing and replaying traffic, and against a false server.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import zmq
from zmq.utils import z85

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.secret_files import check_secret

SERVER = "server"
SERVERS = "servers"  # the folder of servers' own public keys
DEFAULT_CLIENT = "client"
PUBLIC_SUFFIX = ".key"
FRONT = ".front"  # ends the names of fronts
RANK = ".rank"  # ends the names of ranks
SECRET_SUFFIX = ".key_secret"  # noqa: S105  (a file's suffix)

_DOMAIN = b"slipstream"
_GATE = "inproc://zeromq.zap.01"  # the address that libzmq asks; one per context
_FRONT_ID = b"front"  # in place of a front's key: it names its tenants itself (decision 016)
_KEY_CHARS = 40
_MAX_FILE_BYTES = 64 * 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret key, in Z85, the text form that sockets and files take."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The keys of a server's socket: its key pair, and the folder of the keys that it admits: those
    of clients and fronts, or of ranks.
    """

    folder: Path
    pair: KeyPair
    for_ranks: bool = False


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The keys of a client's socket: its key pair, and the server's public key; empty where only
    the servers' own are known (`keys_for`). folder: of the files; None without files.
    """

    server: bytes
    pair: KeyPair
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """The access to a tcp:// server: with keys or, on this machine only, `insecure`."""

    keys: ClientKeys | None = None
    insecure: bool = False


def load_server_keys(folder: Path, *, for_ranks: bool = False) -> ServerKeys:
    """The server's keys. for_ranks: it admits ranks, and has a key of one.

    Raises: BadRequest, PermissionError, OSError.
    """
    _check_folder(folder)
    if for_ranks and not any(folder.glob(f"*{RANK}{PUBLIC_SUFFIX}")):
        made = "(`slipstream keys DIR --rank NAME`)"
        allowed = f"a folder with a rank's key, NAME{RANK}{PUBLIC_SUFFIX} {made}"
        raise BadRequest("keys", str(folder), allowed)
    return ServerKeys(folder, _read_pair(folder / f"{SERVER}{SECRET_SUFFIX}"), for_ranks)


def load_rank_keys(path: Path) -> ClientKeys:
    """A rank's keys; `path` is its secret file, or a folder with one NAME.rank.key_secret.

    Raises: BadRequest, PermissionError, OSError.
    """
    ending = f"{RANK}{SECRET_SUFFIX}"
    found = sorted(path.glob(f"*{ending}")) if path.is_dir() else [path]
    if len(found) != 1 or not found[0].name.endswith(ending):
        allowed = f"a rank's secret file, NAME{ending}, or a folder with one"
        raise BadRequest("keys", str(path), allowed)
    return load_client_keys(found[0])


def load_client_keys(path: Path) -> ClientKeys:
    """A client's keys; `path` is its secret file, or a folder with a client.key_secret.

    The server's public key is read from the same folder; it may be missing where that has a folder
    `servers`. Raises: BadRequest, PermissionError, OSError.
    """
    if path.is_dir():
        path = path / f"{DEFAULT_CLIENT}{SECRET_SUFFIX}"
    _check_folder(path.parent)
    pair = _read_pair(path)
    own = path.parent / f"{SERVER}{PUBLIC_SUFFIX}"
    has_none = (path.parent / SERVERS).is_dir() and not own.exists()
    return ClientKeys(b"" if has_none else _read_public(own), pair, path.parent)


def keys_for(keys: ClientKeys, address: str) -> ClientKeys:
    """The keys for the server at this tcp:// address, which may have a pair of its own.

    Raises: BadRequest, PermissionError, OSError.
    """
    if keys.folder is None:
        return keys
    path = keys.folder / SERVERS / f"{address.partition('://')[2]}{PUBLIC_SUFFIX}"
    if path.parent.name == SERVERS and path.exists():
        _check_folder(path.parent)
        return replace(keys, server=_read_public(path))
    own = keys.folder / f"{SERVER}{PUBLIC_SUFFIX}"
    if not own.exists():
        allowed = f"a folder with the server's public key, {SERVERS}/{path.name} or {own.name}"
        raise BadRequest("keys", str(keys.folder), allowed)
    return replace(keys, server=_read_public(own))


def current_keys(keys: ClientKeys, address: str) -> ClientKeys:
    """Return `keys_for` of the files' current contents; the keys unchanged if they cannot be
    read.
    """
    try:
        return keys_for(keys, address)
    except (BadRequest, OSError) as error:
        logger.warning("the server's key stays as it was read before: %s", error)
        return keys


def secure_server(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Addresses that the socket binds from now on require CURVE and the gate's admission.

    Each bind copies the socket's options, so addresses bound before are not affected.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """The socket's next `connect` reaches the server with these keys, or fails."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret)


def open_gate(context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> threading.Thread:
    """Answer the handshakes of a context's sockets, on a thread that ends with the context.

    It is a thread because handshakes must not wait for the loop, nor the loop for files.
    """
    # a shadow: `context.destroy` closes a context's sockets, and this one is another thread's
    shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
    socket = shadow.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(_GATE)
    except zmq.ZMQError:
        socket.close()
        raise
    gate = threading.Thread(
        target=_keep_gate, args=(socket, keys), name="slipstream-gate", daemon=True
    )
    gate.start()
    return gate


def admitted_as(folder: Path, public: bytes, *, for_ranks: bool = False) -> bytes:
    """The id of the messages of the client with this public key (Z85): the key, or `_FRONT_ID`;
    empty where the folder does not admit it. What is a front's and a client's is a client's.
    for_ranks: admit ranks, in place of clients and fronts.
    """
    found = b""
    for path in folder.glob(f"*{PUBLIC_SUFFIX}"):
        is_rank = path.name.endswith(f"{RANK}{PUBLIC_SUFFIX}")
        if path.name == f"{SERVER}{PUBLIC_SUFFIX}" or is_rank != for_ranks:
            continue
        try:
            if _read(path).get("public-key") == public:
                if not path.name.endswith(f"{FRONT}{PUBLIC_SUFFIX}"):
                    return public
                found = _FRONT_ID
        except (BadRequest, OSError) as error:
            logger.warning("ignoring a key file: %s", error)
    return found


def public_key_of(message: zmq.Frame) -> bytes:
    """The public key (Z85) of the client that a received message is from; empty without CURVE, and
    of fronts.
    """
    try:
        found = str(message.get("User-Id")).encode()
    except zmq.ZMQError:  # the connection has none
        return b""
    return b"" if found == _FRONT_ID else found


def _keep_gate(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Answer according to ZeroMQ RFC 27 (ZAP 1.0), until the context ends."""
    folder, for_ranks = keys.folder, keys.for_ranks
    with socket:
        while True:
            try:
                version, request, domain, _address, _identity, mechanism, *credentials = (
                    socket.recv_multipart()
                )
            except zmq.ContextTerminated:
                return
            user_id = b""  # of a client that is let in
            try:
                _check_folder(folder)
                is_known = (domain, mechanism, len(credentials)) == (_DOMAIN, b"CURVE", 1)
                if is_known and len(credentials[0]) == 32:
                    user_id = admitted_as(folder, z85.encode(credentials[0]), for_ranks=for_ranks)
            except Exception:
                logger.exception("checking a client's key failed")
            answer = (b"200", b"OK") if user_id else (b"400", b"this key is not accepted")
            if not user_id:
                who = "rank" if for_ranks else "client"
                logger.warning("rejected a %s: its key is not one of a %s in %s", who, who, folder)
            try:
                socket.send_multipart((version, request, *answer, user_id, b""))
            except zmq.ContextTerminated:
                return


# ---- files ------------------------------------------------------------------------------------


def _check_folder(folder: Path) -> None:
    status = folder.stat()
    is_shared = status.st_mode & 0o022 and not os.statvfs(folder).f_flag & os.ST_RDONLY
    if status.st_uid not in (0, os.getuid()) or is_shared:
        raise PermissionError(
            f"{folder}: must belong to the user and be writable by no other user (`chmod 700`): "
            "its files decide which clients are accepted"
        )


def _read_pair(path: Path) -> KeyPair:
    found = _read(path)
    check_secret(path)
    public, secret = found.get("public-key"), found.get("secret-key")
    if public is None or secret is None:
        raise _no_key(path, "secret-key" if public is not None else "public-key")
    if zmq.curve_public(secret) != public:
        raise BadRequest("keys", str(path), "a secret key beside its own public one")
    return KeyPair(public, secret)


def _read_public(path: Path) -> bytes:
    public = _read(path).get("public-key")
    if public is None:
        raise _no_key(path, "public-key")
    return public


def _read(path: Path) -> dict[str, bytes]:
    """The keys in a certificate, by name. Raises: BadRequest if one of them is invalid."""
    from zmq.auth import load_certificate  # here because it imports asyncio, which few need

    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise _no_key(path, "public-key")
        public, secret = load_certificate(path)
    except FileNotFoundError:
        allowed = (
            f"a folder that `slipstream keys` made, with {path.name} in it, or a client's secret "
            "file in one"
        )
        raise BadRequest("keys", str(path), allowed) from None
    except (ValueError, IndexError):  # no public key, or a name without a value
        raise _no_key(path, "public-key") from None
    found: dict[str, bytes] = {}
    for name, key in (("public-key", public), ("secret-key", secret)):
        if key is None:
            continue
        try:
            z85.decode(key)
        except Exception:
            key = b""
        if len(key) != _KEY_CHARS:
            raise _no_key(path, name)
        found[name] = key
    return found


def _no_key(path: Path, name: str) -> BadRequest:
    return BadRequest("keys", str(path), f"a certificate with a {name} of {_KEY_CHARS} characters")
