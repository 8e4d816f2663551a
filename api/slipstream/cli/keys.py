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
    RANK,
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
            "slipstream keys server-keys --rank machine-1",
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
        help="the same for a `slipstream route`, trusted to say whose requests it passes on",
    )
    parser.add_argument(
        "--rank",
        metavar="NAME",
        help="the same for a machine that computes ranks (--node-rank): its key lets it take part, "
        "and read and send no request",
    )
    parser.set_defaults(run=keys)


def keys(arguments: argparse.Namespace) -> int:
    """Make key pairs and print the purpose of each file."""
    folder = Path(arguments.folder).expanduser()
    makers = {"client": add_client, "front": add_front, "rank": add_rank}
    arguments.option_names |= {kind: f"--{kind}" for kind in makers}
    given = [kind for kind in makers if getattr(arguments, kind)]
    if len(given) > 1:
        kind = given[-1]
        raise wrong_option(kind, getattr(arguments, kind), f"nothing beside --{given[0]}")
    kind = given[0] if given else "client"
    made = makers[kind](folder, getattr(arguments, kind)) if given else make_folder(folder)
    name = made[-1].name
    lines = [f"made {', '.join(path.name for path in made)} in {folder}"]
    if not given:
        lines.append(f"server: slipstream serve --listen tcp://ADDRESS:PORT --keys {folder}")
    use = {
        "client": f"client: Client('tcp://HOST:PORT', keys='DIR/{name}'), where DIR has",
        "front": f"front: slipstream route tcp://HOST:PORT --keys DIR/{name}, where DIR has",
        "rank": f"rank: slipstream serve … --node-rank N --keys DIR/{name}, where DIR has",
    }
    lines += [
        use[kind],
        f"  copies of that file (a secret: mode 0600) and of {SERVER}{PUBLIC_SUFFIX}",
        f"{kind}s whose {PUBLIC_SUFFIX} file is in {folder} may connect, and no others:",
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
    for ending in (FRONT, RANK):
        if name.endswith(ending):
            allowed = f"a name that does not end with {ending!r}"
            raise bad_request(BadRequest("client", name, allowed))
    return _add("client", folder, name, name)


def add_front(folder: Path, name: str) -> list[Path]:
    """Make the key pair of a front, as `add_client` does."""
    return _add("front", folder, name, f"{name}{FRONT}")


def add_rank(folder: Path, name: str) -> list[Path]:
    """Make the key pair of a machine's ranks, as `add_client` does."""
    return _add("rank", folder, name, f"{name}{RANK}")


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
