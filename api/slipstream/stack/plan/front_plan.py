"""The HTTP fronts of a stack or a router: where they listen, whom they answer, their keys."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from slipstream.api_key_file import ALLOWED, KeyFiles, is_key
from slipstream.errors import wrong_option
from slipstream.loopback import is_loopback
from slipstream.stack.children.process import ChildSpec
from slipstream.stack.plan.child_spec import child_spec
from slipstream.stack.settings import StackSettings, passed_to
from slipstream.tls import tls_context
from slipstream.trusted_proxies import TrustedProxies, is_ip_address
from slipstream_ipc.process import process_name, role_of
from slipstream_ipc.secret_files import check_secret

API_KEY_VARIABLE = "SLIPSTREAM_API_KEY"
FRONT = "http"  # the role of the HTTP fronts
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9][\w.-]*", re.ASCII)
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+")


def front_specs(settings: StackSettings, front: dict[str, Any]) -> list[ChildSpec]:
    """The processes of the HTTP fronts. front: what their server is. Raises: BadRequestError."""
    if settings.http_port is None and settings.uds is None:
        if settings.http_workers > 1:
            allowed = "1 without http_port and uds"
            raise wrong_option("http_workers", settings.http_workers, allowed)
        for name in ("ssl_certfile", "ssl_keyfile"):
            if (value := getattr(settings, name)) is not None:
                raise wrong_option(name, value, "None without http_port and uds")
        return []
    if settings.http_port is not None and settings.uds is not None:
        raise wrong_option(
            "uds", settings.uds, "None with http_port: a front listens at one of them"
        )
    certfile, keyfile = _certificates(settings)
    config = {
        **front,
        **passed_to("http", settings),
        "host": settings.host,
        "port": settings.http_port or 0,
        "api_keys": _listed_keys(settings),
        **_key_files(settings),
        "allowed_origins": allowed_origins(settings),
        "allowed_hosts": allowed_hosts(settings),
        "uds": None if settings.uds is None else os.path.abspath(settings.uds),
        "ssl_certfile": certfile,
        "ssl_keyfile": keyfile,
        "forwarded_allow_ips": forwarded_allow_ips(settings),
        "strict_finish": settings.openai_strict_finish,
        "is_traced": settings.otlp_traces_endpoint is not None,
    }
    return [
        child_spec(
            name,
            "slipstream.http.main",
            config,
            drains=True,
            receives_condition=True,
            front_index=front_index,
        )
        for front_index, name in enumerate(front_names(settings.http_workers))
    ]


def _certificates(settings: StackSettings) -> tuple[str | None, str | None]:
    """The fronts' certificate and key files, read once as a check. Raises: BadRequestError."""
    certfile, keyfile = settings.ssl_certfile, settings.ssl_keyfile
    if certfile is None:
        if keyfile is not None:
            raise wrong_option("ssl_keyfile", keyfile, "None without ssl_certfile")
        return None, None
    files = [None if each is None else os.path.abspath(each) for each in (certfile, keyfile)]
    assert files[0] is not None
    try:
        check_secret(Path(files[1] or files[0]))
    except OSError as error:
        name, given = ("ssl_certfile", certfile) if keyfile is None else ("ssl_keyfile", keyfile)
        raise wrong_option(name, given, f"a private key that can be read ({error})") from None
    try:
        tls_context(files[0], files[1])
    except OSError as error:
        what = f"a certificate in PEM and its key in ssl_keyfile, unencrypted ({error})"
        raise wrong_option("ssl_certfile", certfile, what) from None
    return files[0], files[1]


def forwarded_allow_ips(settings: StackSettings) -> tuple[str, ...]:
    """The checked list of trusted proxies. Raises: BadRequestError."""
    given = settings.forwarded_allow_ips
    found = (given,) if isinstance(given, str) else given
    names = tuple(each.strip() for one in found for each in one.split(","))
    try:
        TrustedProxies(names)
    except ValueError:
        allowed = "addresses, networks (10.0.0.0/8), unix, or *"
        raise wrong_option("forwarded_allow_ips", given, allowed) from None
    return names


def front_names(number: int) -> list[str]:
    """The process names of the fronts."""
    return [process_name(FRONT, index, number) for index in range(number)]


def is_front(name: str) -> bool:
    """True if this is the process name of a front."""
    return role_of(name) == FRONT


def has_api_keys(settings: StackSettings) -> bool:
    """True if HTTP requests need a key. Raises: BadRequestError, without a key."""
    return bool(_listed_keys(settings)) or settings.api_key_file is not None


def _listed_keys(settings: StackSettings) -> tuple[str, ...]:
    """The given keys and $SLIPSTREAM_API_KEY. Raises: BadRequestError, without a key."""
    given = (settings.api_key,) if isinstance(settings.api_key, str) else tuple(settings.api_key)
    if not all(map(is_key, given)):
        raise wrong_option("api_key", given, ALLOWED)
    from_environment = os.environ.get(API_KEY_VARIABLE)
    if from_environment is None:
        return given
    if not is_key(from_environment):
        shown = "(not shown)" if from_environment else ""
        allowed = f"{ALLOWED}; unset it where there is to be no key"
        raise wrong_option(f"${API_KEY_VARIABLE}", shown, allowed)
    return (*given, from_environment)


def _key_files(settings: StackSettings) -> dict[str, str | None]:
    """The files of more keys, which the fronts read again as they change; read once as a check.

    Raises: BadRequestError, without a key.
    """
    files = KeyFiles(settings.api_key_file, settings.priority_key_file, settings.lora_key_file)
    files.read(_listed_keys(settings))
    return {
        "api_key_file": files.api_keys,
        "priority_key_file": files.priority_keys,
        "lora_key_file": files.lora_keys,
    }


def open_host(settings: StackSettings) -> str | None:
    """The host at which everybody who reaches it is served: beyond this machine, and without a key.

    Raises: BadRequestError.
    """
    is_local = settings.http_port is None or is_loopback(settings.host)
    return None if is_local or has_api_keys(settings) else settings.host


def allowed_origins(settings: StackSettings) -> tuple[str, ...]:
    """The checked origins whose pages may read a front's answers. Raises: BadRequestError."""
    given = settings.allowed_origins
    origins = (given,) if isinstance(given, str) else given
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise wrong_option("allowed_origins", origin, "http(s)://HOST[:PORT], or *")
    return origins


def allowed_hosts(settings: StackSettings) -> tuple[str, ...]:
    """The checked host names by which HTTP clients may address a front. Raises: BadRequestError."""
    given = settings.allowed_hosts
    hosts = (given,) if isinstance(given, str) else given
    for host in hosts:
        if host != "*" and not _HOST.fullmatch(host) and not is_ip_address(host):
            raise wrong_option("allowed_hosts", host, "HOST or *.DOMAIN without a port, or *")
    return hosts
