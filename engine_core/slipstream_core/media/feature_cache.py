"""The features of images that requests of late had, by what they are of.

Those of a request that has not ended are held, whatever the cache keeps: its prompt may have to be
computed again. A request begins to be prepared only while those that are held have fewer than
`max_rows` rows; one alone may have as many. So there are at most twice as many held, and as many
again in the cache.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable

from slipstream_core.step.plan import ItemFeatures


class FeatureCache:
    """Features by key, the latest last. For any thread."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._kept: OrderedDict[bytes, ItemFeatures] = OrderedDict()
        self._num_kept = 0
        self._held: Counter[ItemFeatures] = Counter()
        self._num_held = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> ItemFeatures | None:
        """The features under a key, which are the latest now; None if they are not kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: bytes, features: ItemFeatures) -> None:
        """Keep features; the oldest go."""
        with self._lock:
            if key in self._kept:
                self._num_kept -= len(self._kept.pop(key))
            self._kept[key] = features
            self._num_kept += len(features)
            while self._num_kept > self.max_rows:
                _, oldest = self._kept.popitem(last=False)
                self._num_kept -= len(oldest)

    def hold(self, features: Iterable[ItemFeatures]) -> None:
        """A request has these, one for each of its images, until `release`."""
        with self._lock:
            for each in features:
                self._num_held += 0 if self._held[each] else len(each)
                self._held[each] += 1

    def release(self, features: Iterable[ItemFeatures]) -> None:
        """A request has these no longer."""
        with self._lock:
            for each in features:
                self._held[each] -= 1
                if not self._held[each]:
                    del self._held[each]
                    self._num_held -= len(each)

    @property
    def num_held(self) -> int:
        """Rows that requests hold, each counted once."""
        return self._num_held

    @property
    def num_kept(self) -> int:
        """Rows in the cache."""
        return self._num_kept
