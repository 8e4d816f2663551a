"""API keys. They are compared in constant time, kept as digests only, and never logged or shown."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from slipstream.http.errors import ApiError, unauthorized

_SCHEME = b"bearer "


class ApiKeys:
    """The accepted keys. With none, no request needs a key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def check(self, authorization: bytes | None) -> ApiError | None:
        """The 401 for a missing or wrong `Authorization` header; None if it is accepted."""
        if not self._digests:
            return None
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            return unauthorized(was_given=False)
        given = _digest(authorization[len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return None if any(matches) else unauthorized(was_given=True)

    def tenant(self, authorization: bytes | None) -> bytes:
        """The tenant that the engine sees for an accepted key: 16 bytes, empty without keys.

        A hash of the key: as hard to guess as the key, and the key cannot be derived from it.
        """
        if not self._digests or authorization is None:
            return b""
        return _digest(b"tenant " + authorization[len(_SCHEME) :].strip())[:16]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
