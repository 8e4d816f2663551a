"""The adapters that a core's streams have, by name and content. Pure but for its store.

A version is what lay in a folder when it was read: a name with a digest, at a place of its own. A
name is served by one version. A version that is served no longer is retired: streams go on with it,
and it is dropped with the last of them.

- A retired version is kept for _LINGER_S in any case, unless its room is needed: registrations that
  workers made before they heard of the change are on their way.
- A place is freed once no step that was launched while streams had it is in flight: the device
  reads its factors where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from slipstream_core.adapters.adapter_error import AdapterError
from slipstream_core.step.plan import AdapterStore, LoadedAdapter
from slipstream_ipc.messages import AdapterRef, Fault, RequestSpec

_LINGER_S = 10.0


@dataclass(eq=False, slots=True)
class AdapterVersion:
    """Factors that were read from a folder, at their place."""

    ref: AdapterRef
    place: int
    num_streams: int = 0  # admitted or pending, until they are over
    retired_at: float | None = None  # monotonic
    free_after: int | None = None  # a step: the last that may read the place; None: not looked at


class Adapters:
    """The adapters of a loaded model."""

    def __init__(
        self,
        served: Sequence[AdapterRef] = (),
        retired: Sequence[AdapterRef] = (),
        *,
        num_places: int = 0,
        store: AdapterStore | None = None,
        now: float = 0.0,
    ) -> None:
        """served, retired: those at the first places, in this order. store: what holds them; None:
        nothing is changed.
        """
        self._store = store
        self._served: dict[str, AdapterVersion] = {}
        self._versions: dict[tuple[str, bytes], AdapterVersion] = {}
        for place, ref in enumerate((*served, *retired)):
            version = AdapterVersion(ref, place)
            self._versions[ref.name, ref.digest] = version
            if place < len(served):
                self._served[ref.name] = version
            else:
                version.retired_at = now
        taken = len(self._versions)
        self._free = list(range(max(num_places, taken) - 1, taken - 1, -1))
        self.launched_step = self.collected_step = 0

    @property
    def served(self) -> tuple[AdapterRef, ...]:
        """The versions that names are served by."""
        return tuple([each.ref for each in self._served.values()])

    @property
    def retired(self) -> tuple[AdapterRef, ...]:
        """The versions that are served no longer and not dropped yet."""
        return tuple([it.ref for it in self._versions.values() if it.retired_at is not None])

    def find(self, name: str) -> AdapterVersion | None:
        """The version that a name is served by."""
        return self._served.get(name)

    def name_at(self, place: int) -> str:
        """The name of the adapter at a place that is in use."""
        return next(it.ref.name for it in self._versions.values() if it.place == place)

    # ---- streams -----------------------------------------------------------------------------

    def objection(self, spec: RequestSpec) -> Fault | None:
        """The reason why a stream cannot have its adapter; None if it can.

        A stream that came from another core goes on with the files that it began with, or not.
        """
        if not spec.adapter or (spec.adapter, spec.adapter_digest) in self._versions:
            return None
        if spec.adapter in self._served:
            return Fault("diverged", f"the files of the adapter {spec.adapter!r} have changed")
        return Fault("diverged", f"the adapter {spec.adapter!r} is not served any more")

    def place_of(self, spec: RequestSpec) -> int:
        """The place of a stream's adapter; -1: it has none."""
        return self._version_of(spec).place if spec.adapter else -1

    def hold(self, spec: RequestSpec) -> None:
        """A stream without objection is admitted, or pending."""
        if spec.adapter:
            version = self._version_of(spec)
            version.num_streams += 1
            version.free_after = None

    def release(self, spec: RequestSpec) -> None:
        """It is not any more."""
        if spec.adapter:
            version = self._version_of(spec)
            assert version.num_streams > 0
            version.num_streams -= 1

    def _version_of(self, spec: RequestSpec) -> AdapterVersion:
        return self._versions[spec.adapter, spec.adapter_digest]

    # ---- changes -----------------------------------------------------------------------------

    def put(self, name: str, path: str, adapter: LoadedAdapter, now: float) -> int:
        """Serve an adapter under a name; returns how many streams go on with what was served under
        it before, if that is another. Its room has been checked (`check_room`).
        """
        assert self._store is not None
        ref, before = AdapterRef(name, path, adapter.digest), self._served.get(name)
        version = self._versions.get((name, adapter.digest))
        if version is None:
            version = AdapterVersion(ref, self._free.pop())
            self._versions[name, adapter.digest] = version
            self._store.put(version.place, adapter)
        version.ref, version.retired_at, version.free_after = ref, None, None
        self._served[name] = version
        return 0 if before is None or before is version else self._retire(before, now)

    def forget(self, name: str, now: float) -> int:
        """Serve a name no longer; returns how many streams go on with what it was."""
        return self._retire(self._served.pop(name), now)

    def check_room(self, name: str, adapter: LoadedAdapter, most_bytes: float) -> None:
        """Raises AdapterError without a place, or memory of `most_bytes` in all, for an adapter.
        Versions that no stream has make room.
        """
        assert self._store is not None
        if (name, adapter.digest) in self._versions:
            return
        used = sum([self._store.num_bytes(it.place) for it in self._versions.values()])
        if not self._free or used + adapter.num_bytes > most_bytes:
            for _ in self.drop_unused(inf):
                pass
            used = sum([self._store.num_bytes(it.place) for it in self._versions.values()])
        may_go = ", ".join([repr(each) for each in self._served if each != name]) or "none"
        if not self._free:
            raise AdapterError(
                f"all {len(self._versions)} places are taken (--max-loras), also by those that "
                f"streams still have; loaded: {may_go}",
                "no_room",
            )
        if used + adapter.num_bytes > most_bytes:
            free = max(0.0, most_bytes - used)
            raise AdapterError(
                f"it takes {adapter.num_bytes / 1e6:.1f} MB of memory, free: {free / 1e6:.1f} MB "
                f"(--lora-gib, and what the machine has); loaded: {may_go}",
                "no_room",
            )

    def drop_unused(self, now: float) -> Iterator[AdapterRef]:
        """Drop the retired versions that no stream has and no step reads; now: inf hurries."""
        for key, version in list(self._versions.items()):
            if version.retired_at is None or version.num_streams:
                continue
            if now < version.retired_at + _LINGER_S:
                continue
            if version.free_after is None:
                version.free_after = self.launched_step
            if self.collected_step >= version.free_after:
                assert self._store is not None
                self._store.clear(version.place)
                self._free.append(version.place)
                del self._versions[key]
                yield version.ref

    def _retire(self, version: AdapterVersion, now: float) -> int:
        version.retired_at = now
        return version.num_streams
