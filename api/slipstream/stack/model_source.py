"""Where a model or a tokenizer is from, as the user names it: a folder or a hub id.

What cannot be had is found before a process is started: a core would need seconds for its imports,
and transformers would try the hub for more than a minute.
"""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.errors import BadRequestError, wrong_option
from slipstream.spelling import did_you_mean

_CONFIG = "config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_GGUF = ".gguf"
_NO_GGUF = (
    "a folder with a config.json and safetensors, or a hub id. GGUF files are not supported; the "
    "checkpoint that they were made from is"
)
_CONNECT_S = 5.0


class UnreachableHubError(BadRequestError):
    """No hub answers, and there is no earlier download. The same may succeed later."""


def folder_or_hub_id(option: str, value: str, more: str = "") -> str:
    """The absolute path of a folder, or a hub id.

    option: `model` or `tokenizer`. more: what else is allowed. Raises: BadRequestError.
    """
    path = Path(value).expanduser()
    is_model = option == "model"
    if path.is_dir() and (not is_model or (path / _CONFIG).is_file()):
        return str(path.absolute())
    if is_model and _is_gguf(path):
        raise wrong_option(option, value, _NO_GGUF)
    if path.exists() or not _HUB_ID.fullmatch(value):
        folder = f"a folder with a {_CONFIG if is_model else 'tokenizer'}"
        allowed = ", ".join(filter(None, (folder, "a hub id (NAME or ORGANISATION/NAME)", more)))
        lacks = f"; {path.absolute()} has no {_CONFIG}" if value and path.is_dir() else ""
        raise wrong_option(option, value, f"{allowed}{lacks or _nearest(path)}")
    return value


def check_hub(option: str, value: str) -> None:
    """Check that a hub id can be had: from an earlier download, or from a hub that answers.

    value: as returned by `folder_or_hub_id`. Whether the hub has the model is not checked, and
    behind a proxy nothing is. Raises: BadRequestError, of it UnreachableHubError.
    """
    from huggingface_hub import constants  # takes a moment, and most models are folders

    folder = Path(constants.HF_HUB_CACHE) / f"models--{value.replace('/', '--')}" / "snapshots"
    if any(folder.glob("*/*")):
        return
    if constants.HF_HUB_OFFLINE:
        raise _unreachable(option, value, "HF_HUB_OFFLINE is set", constants.HF_HUB_CACHE)
    parts = urlsplit(constants.ENDPOINT)
    if parts.hostname is None or parts.scheme in urllib.request.getproxies():
        return
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname, port), _CONNECT_S).close()
    except OSError as error:
        why = f"{constants.ENDPOINT} cannot be reached ({error.strerror or error})"
        unreachable = _unreachable(option, value, why, constants.HF_HUB_CACHE)
        raise UnreachableHubError(unreachable.fault) from None


def _unreachable(option: str, value: str, why: str, cache: str) -> BadRequestError:
    allowed = (
        f"a folder, or a hub id that can be had. {why}, and {cache} has no earlier download: give "
        f"a folder, or run `hf download {value}` where the hub can be reached, and bring the cache "
        f"along{_nearest(Path(value))}"
    )
    return wrong_option(option, value, allowed)


def _is_gguf(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob(f"*{_GGUF}"))
    return path.name.lower().endswith((_GGUF, _GGUF.replace(".", "-")))


def _nearest(path: Path) -> str:
    """A suggestion for a path that does not exist."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return f"; there is no folder {path.parent}" if path.is_absolute() else ""
    hint = "" if path.exists() else did_you_mean(path.name, names)
    return hint.replace("mean ", f"mean {path.parent}/") if path.parent != Path() else hint
