"""The TLS context of the HTTP server."""

from __future__ import annotations

import ssl


def tls_context(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    """A server context for HTTP/1.1 over TLS 1.2 or later.

    certfile, keyfile: PEM files; keyfile is None where certfile contains the key.

    Raises: OSError, or its subclass ssl.SSLError, for files that cannot be read or do not match,
    and for an encrypted key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certfile, keyfile, password=_no_password)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> str:
    raise OSError("the key is encrypted; allowed: one without a password")
