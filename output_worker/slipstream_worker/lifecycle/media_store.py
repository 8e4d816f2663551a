"""The files of images that the streams of a worker have, each once however many streams have it.

- A tenant has copies of its own, and may have as many bytes as are left of twice MAX_MEDIA_BYTES: a
  tenant alone is limited to half, and there is always room for another.
- A stream holds its files until it ends: then nothing is computed of them any more.
"""

from __future__ import annotations

from collections import Counter

from slipstream_ipc.messages import MediaItem

MAX_MEDIA_BYTES = 128 * 2**20


class MediaStore:
    """Files by tenant and digest. Pure."""

    def __init__(self) -> None:
        self._items: dict[tuple[bytes, bytes], MediaItem] = {}  # by tenant and digest
        self._holders: Counter[tuple[bytes, bytes]] = Counter()
        self._by_stream: dict[bytes, tuple[tuple[bytes, bytes], ...]] = {}  # keys, by stream id
        self._bytes: Counter[bytes] = Counter()  # by tenant

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return self._bytes.total()

    def why_full(self, tenant: bytes, media: tuple[MediaItem, ...]) -> str:
        """The reason to reject a stream with these files; empty if there is room for them."""
        new = {it.digest: len(it.data) for it in media if (tenant, it.digest) not in self._items}
        own = self._bytes[tenant] + sum(new.values())
        if not new or own <= 2 * MAX_MEDIA_BYTES - self.num_bytes:
            return ""
        return f"images of {self._bytes[tenant]} bytes are held already"

    def hold(
        self, stream_id: bytes, tenant: bytes, media: tuple[MediaItem, ...]
    ) -> tuple[MediaItem, ...]:
        """Hold a stream's files until `release`; idempotent. Returns the copies that are kept."""
        if not media:
            return media
        keys = tuple((tenant, item.digest) for item in media)
        if stream_id not in self._by_stream:
            self._by_stream[stream_id] = keys
            for key, item in zip(keys, media, strict=True):
                self._holders[key] += 1
                if key not in self._items:
                    self._items[key] = item
                    self._bytes[tenant] += len(item.data)
        return tuple(self._items.get(key, item) for key, item in zip(keys, media, strict=True))

    def release(self, stream_id: bytes) -> None:
        """The stream needs its files no longer. Idempotent."""
        for key in self._by_stream.pop(stream_id, ()):
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._bytes[key[0]] -= len(self._items.pop(key).data)
                if not self._bytes[key[0]]:
                    del self._bytes[key[0]]

    def clear(self) -> None:
        """Forget all of them."""
        for each in (self._items, self._holders, self._by_stream, self._bytes):
            each.clear()
