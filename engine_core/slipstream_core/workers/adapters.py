"""The adapters that a core's streams have, by name and content. Pure but for its store.

A version is what lay in a folder when it was read: a name with a digest, at a place of its own. A
name is served by one version. A version that is served no longer is retired: streams go on with it,
and it is dropped with the last of them.

- A retired version is kept for a while in any case, unless its room is needed: registrations that
  workers made before they heard of the change are on their way, and in a fleet streams of a
  replica that is lost.
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

LINGER_S = 10.0
FLEET_LINGER_S = 600.0


@dataclass(eq=False, slots=True)
class AdapterVersion:
    """Factors that were read from a folder, at their place."""

    ref: AdapterRef
    place: int
    num_streams: int = 0  # admitted or pending, until they are over
    kept_until: float | None = None  # monotonic; None: it is served
    free_after: int = 0  # a step: the last that may read the place, where no stream has it


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
                version.kept_until = now + LINGER_S
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
        return tuple([it.ref for it in self._versions.values() if it.kept_until is not None])

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

    def release(self, spec: RequestSpec) -> None:
        """It is not any more."""
        if spec.adapter:
            version = self._version_of(spec)
            assert version.num_streams > 0
            version.num_streams -= 1
            if not version.num_streams:
                version.free_after = self.launched_step

    def _version_of(self, spec: RequestSpec) -> AdapterVersion:
        return self._versions[spec.adapter, spec.adapter_digest]

    # ---- changes -----------------------------------------------------------------------------

    def has(self, name: str, digest: bytes) -> bool:
        """True if a version of a name is in memory."""
        return (name, digest) in self._versions

    def put(
        self, name: str, path: str, adapter: LoadedAdapter, now: float, linger_s: float = LINGER_S
    ) -> int:
        """Serve an adapter under a name. Its room has been checked (`check_room`). The rest is as
        in `serve`.
        """
        assert self._store is not None
        if not self.has(name, adapter.digest):
            version = AdapterVersion(AdapterRef(name, path, adapter.digest), self._free.pop())
            self._versions[name, adapter.digest] = version
            self._store.put(version.place, adapter)
        return self.serve(name, path, adapter.digest, now, linger_s)

    def serve(
        self, name: str, path: str, digest: bytes, now: float, linger_s: float = LINGER_S
    ) -> int:
        """Serve a version that is in memory; returns how many streams go on with what was served
        under the name before, if that is another. It is kept for `linger_s` without streams.
        """
        version, before = self._versions[name, digest], self._served.get(name)
        version.ref = AdapterRef(name, path, digest)
        version.kept_until = None
        self._served[name] = version
        if before is None or before is version:
            return 0
        return self._retire(before, now + linger_s)

    def forget(self, name: str, now: float, linger_s: float = LINGER_S) -> int:
        """Serve a name no longer; returns how many streams go on with what it was."""
        return self._retire(self._served.pop(name), now + linger_s)

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
            if version.kept_until is None or version.num_streams or now < version.kept_until:
                continue
            if self.collected_step >= version.free_after:
                assert self._store is not None
                self._store.clear(version.place)
                self._free.append(version.place)
                del self._versions[key]
                yield version.ref

    def _retire(self, version: AdapterVersion, kept_until: float) -> int:
        version.kept_until = kept_until
        if not version.num_streams:
            version.free_after = self.launched_step
        return version.num_streams
