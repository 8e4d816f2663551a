"""`slipstream keys`: makes CURVE key pairs for tcp:// addresses.

`slipstream_ipc.transport.curve` reads the files, and explains their purposes.

- Nothing is overwritten: holders of the old key would be locked out without notice.
- A secret is written only to a new file of mode 0600.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import zmq

from slipstream.cli.options.parser import Parser
from slipstream.errors import bad_request, wrong_option
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.transport.curve import (
    DEFAULT_CLIENT,
    FRONT,
    PUBLIC_SUFFIX,
    SECRET_SUFFIX,
    SERVER,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def add_keys(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce(
        "DIR [options]",
        (
            "slipstream keys server-keys",
            "slipstream keys server-keys --client ana",
            "slipstream keys server-keys --front route",
        ),
    )
    parser.add_argument(
        "folder", metavar="DIR", help="folder for the keys; created if it does not exist"
    )
    parser.add_argument(
        "--client",
        metavar="NAME",
        help="add a key pair for one more client to the server's folder, in place of a new folder",
    )
    parser.add_argument(
        "--front",
        metavar="NAME",
        help="the same for a `slipstream route`, whose API keys are tenants, as they are not of a "
        "client: it is trusted to say whose requests it passes on",
    )
    parser.set_defaults(run=keys)


def keys(arguments: argparse.Namespace) -> int:
    """Make key pairs and print the purpose of each file."""
    folder = Path(arguments.folder).expanduser()
    arguments.option_names |= {"client": "--client", "front": "--front"}
    if arguments.client and arguments.front:
        raise wrong_option("front", arguments.front, "nothing beside --client")
    if arguments.front:
        made = add_front(folder, arguments.front)
    else:
        made = add_client(folder, arguments.client) if arguments.client else make_folder(folder)
    name = made[-1].name
    lines = [f"made {', '.join(path.name for path in made)} in {folder}"]
    if not arguments.client and not arguments.front:
        lines.append(f"server: slipstream serve --listen tcp://ADDRESS:PORT --keys {folder}")
    if arguments.front:
        lines.append(f"front: slipstream route tcp://HOST:PORT --keys DIR/{name}, where DIR has")
    else:
        lines.append(f"client: Client('tcp://HOST:PORT', keys='DIR/{name}'), where DIR has")
    lines += [
        f"  copies of that file (a secret: mode 0600) and of {SERVER}{PUBLIC_SUFFIX}",
        f"clients whose {PUBLIC_SUFFIX} file is in {folder} may connect, and no others:",
        "  remove the file to shut one out",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def make_folder(folder: Path) -> list[Path]:
    """Make the key pairs of a server and a first client.

    Returns the files, the client's secret last. Raises: BadRequestError where one of them exists;
    OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _make_pairs(folder, SERVER, DEFAULT_CLIENT)


def add_client(folder: Path, name: str) -> list[Path]:
    """Make the key pair of one more client. Returns the files, the secret last.

    Raises: BadRequestError for an invalid name, or where the folder has no server key; OSError.
    """
    if name.endswith(FRONT):
        raise bad_request(BadRequest("client", name, f"a name that does not end with {FRONT!r}"))
    return _add("client", folder, name, name)


def add_front(folder: Path, name: str) -> list[Path]:
    """Make the key pair of a front, as `add_client` does."""
    return _add("front", folder, name, f"{name}{FRONT}")


def _add(field: str, folder: Path, name: str, file_name: str) -> list[Path]:
    if not _NAME.fullmatch(name) or name == SERVER:
        allowed = f"a file's name: letters, digits, '.', '_' and '-', not {SERVER!r}"
        raise bad_request(BadRequest(field, name, allowed))
    if not (folder / f"{SERVER}{PUBLIC_SUFFIX}").exists():
        raise bad_request(BadRequest("DIR", str(folder), "a folder with a server's keys"))
    return _make_pairs(folder, file_name)


def _make_pairs(folder: Path, *names: str) -> list[Path]:
    paths = [folder / f"{name}{end}" for name in names for end in (PUBLIC_SUFFIX, SECRET_SUFFIX)]
    for path in paths:
        if path.exists() or path.is_symlink():
            allowed = f"no {path.name} there yet: keys are never overwritten"
            raise bad_request(BadRequest("DIR", str(folder), allowed))
    for name in names:
        public, secret = zmq.curve_keypair()
        is_server = name == SERVER
        _write(
            folder / f"{name}{PUBLIC_SUFFIX}",
            0o644,
            f"a {'server' if is_server else 'client'}'s public key, for everybody to know",
            f'    public-key = "{public.decode()}"\n',
        )
        _write(
            folder / f"{name}{SECRET_SUFFIX}",
            0o600,
            f"a {'server' if is_server else 'client'}'s SECRET key: show it to nobody",
            f'    public-key = "{public.decode()}"\n    secret-key = "{secret.decode()}"\n',
        )
    return paths


def _write(path: Path, mode: int, about: str, keys: str) -> None:
    """Write a new file with a ZeroMQ certificate (ZPL). Raises: OSError where it exists."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, mode)  # regardless of the umask
        file.write(
            f"# Slipstream: {about}\n# A ZeroMQ CURVE certificate.\n\nmetadata\ncurve\n{keys}"
        )
