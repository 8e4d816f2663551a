"""The address that traces are sent to, checked."""

from __future__ import annotations

from importlib.util import find_spec
from urllib.parse import urlsplit

from slipstream.errors import wrong_option

_OTLP_PATH = "/v1/traces"
_OTEL = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def checked_otlp_endpoint(given: str | None) -> str | None:
    """The URL that traces are sent to; one without a path gets OTLP's. Raises: BadRequestError."""
    if given is None:
        return None
    option = "otlp_traces_endpoint"
    try:
        url = urlsplit(given)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # of the port or the brackets of an address
        is_url = False
    if not is_url or url.username is not None or url.query or url.fragment:
        allowed = (
            "http(s)://HOST[:PORT][/PATH] without a user (OTEL_EXPORTER_OTLP_HEADERS has keys)"
        )
        raise wrong_option(option, _without_user(given), allowed)
    if not all(map(_is_installed, _OTEL)):
        allowed = "None without the OpenTelemetry SDK: pip install 'slipstream[otel]'"
        raise wrong_option(option, given, allowed)
    return given if url.path.strip("/") else given.rstrip("/") + _OTLP_PATH


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _without_user(url: str) -> str:
    scheme, _, rest = url.rpartition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if scheme else rest.rpartition("@")[2]
