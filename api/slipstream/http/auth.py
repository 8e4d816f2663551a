"""API keys. They are compared in constant time, kept as digests only, and never logged or shown."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from slipstream.http.api_errors import ApiError, unauthorized

_SCHEME = b"bearer "


class ApiKeys:
    """The accepted keys. With none, no request needs a key."""

    def __init__(
        self,
        keys: Sequence[str],
        priority_keys: Sequence[str] = (),
        lora_keys: Sequence[str] = (),
    ) -> None:
        """See `accept`."""
        self.accept(keys, priority_keys, lora_keys)

    def accept(
        self,
        keys: Sequence[str],
        priority_keys: Sequence[str] = (),
        lora_keys: Sequence[str] = (),
    ) -> None:
        """Accept these keys from now on, and no others.

        priority_keys: those whose priorities count among the requests of all tenants. lora_keys:
        those with which adapters may be changed.
        """
        self._digests = tuple(_digest(key.encode()) for key in keys)
        self._with_priority = frozenset(_tenant(key.encode()) for key in priority_keys)
        self._with_loras = frozenset(_tenant(key.encode()) for key in lora_keys)

    def check(self, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """The 401 for a missing or wrong key; None if it is accepted."""
        if not self._digests:
            return None
        given = _given_key(headers)
        if given is None:
            return unauthorized(was_given=False)
        matches = [hmac.compare_digest(_digest(given), digest) for digest in self._digests]
        return None if any(matches) else unauthorized(was_given=True)

    def tenant(self, headers: Mapping[bytes, bytes]) -> bytes:
        """The tenant that the engine sees for an accepted key: 16 bytes, empty without keys.

        A hash of the key: as hard to guess as the key, and the key cannot be derived from it.
        """
        given = _given_key(headers) if self._digests else None
        return b"" if given is None else _tenant(given)

    def has_priority(self, tenant: bytes) -> bool:
        """Return True if the tenant's priorities count among all, not among its own requests."""
        return not self._digests or tenant in self._with_priority

    def may_change_adapters(self, tenant: bytes) -> bool:
        """Return True if the tenant may load and unload adapters; anyone may without keys."""
        return not self._digests or tenant in self._with_loras


def _given_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key of a request: of `Authorization: Bearer`, or else of `x-api-key`, as Anthropic's
    clients send it.
    """
    authorization = headers.get(b"authorization", b"")
    if authorization.lower().startswith(_SCHEME):
        return authorization[len(_SCHEME) :].strip()
    given = headers.get(b"x-api-key")
    return None if given is None else given.strip()


def _tenant(key: bytes) -> bytes:
    return _digest(b"tenant " + key)[:16]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
