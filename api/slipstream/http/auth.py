"""Who may ask: API keys.

Owns: the comparison. Rules: it takes as long for a wrong key as for a right one, and no key is ever
logged, shown or kept in the clear.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from slipstream.http.errors import ApiError, unauthorized

_SCHEME = b"bearer "


class Keys:
    """The keys that are accepted; none of them at all lets everybody in."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def check(self, authorization: bytes | None) -> ApiError | None:
        """The refusal that the header `authorization` deserves."""
        if not self._digests:
            return None
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            return unauthorized(was_given=False)
        given = _digest(authorization[len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return None if any(matches) else unauthorized(was_given=True)

    def tenant(self, authorization: bytes | None) -> bytes:
        """For whom the engine is told that requests with an accepted key are, 16 bytes; empty where
        there are no keys. It is as hard to guess as the key, which does not follow from it.
        """
        if not self._digests or authorization is None:
            return b""
        return _digest(b"tenant " + authorization[len(_SCHEME) :].strip())[:16]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
