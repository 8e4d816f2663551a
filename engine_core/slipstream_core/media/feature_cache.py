"""The features of images that requests of late had, by what they are of.

Those of a request that has not ended are held, whatever the cache keeps: its prompt may have to be
computed again.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict

from slipstream_core.media.places import MediaPlaces
from slipstream_core.step.plan import ItemFeatures


class FeatureCache:
    """Features by key, the latest last. For any thread."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._kept: OrderedDict[bytes, ItemFeatures] = OrderedDict()
        self._num_kept = 0
        self._held: Counter[tuple[bytes, ItemFeatures]] = Counter()  # by tenant
        self._rows_held: Counter[bytes] = Counter()  # by tenant
        self._tenants: dict[MediaPlaces, bytes] = {}  # of requests
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

    def hold(self, places: MediaPlaces, tenant: bytes) -> None:
        """A tenant's request has the features of these, until `release`."""
        with self._lock:
            self._tenants[places] = tenant
            for each in places.features:
                if not self._held[tenant, each]:
                    self._rows_held[tenant] += len(each)
                self._held[tenant, each] += 1

    def release(self, places: MediaPlaces) -> None:
        """The request has them no longer."""
        with self._lock:
            tenant = self._tenants.pop(places)
            for each in places.features:
                self._held[tenant, each] -= 1
                if not self._held[tenant, each]:
                    del self._held[tenant, each]
                    self._rows_held[tenant] -= len(each)
            if not self._rows_held[tenant]:
                del self._rows_held[tenant]

    def num_held_by(self, tenant: bytes) -> int:
        """Rows that a tenant's requests hold, each counted once."""
        with self._lock:
            return self._rows_held[tenant]

    @property
    def num_held(self) -> int:
        """Rows that requests of all tenants hold."""
        with self._lock:
            return self._rows_held.total()

    @property
    def num_kept(self) -> int:
        """Rows in the cache."""
        return self._num_kept
