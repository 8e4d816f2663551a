"""The adapters that a core's streams have, by name and content."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream_ipc.messages import AdapterRef, Fault, RequestSpec


class Adapters:
    """The adapters of a loaded model; an adapter's place is its number among them."""

    def __init__(self, served: Sequence[AdapterRef] = ()) -> None:
        self._served = served
        self._places = {each.digest: place for place, each in enumerate(served)}

    def objection(self, spec: RequestSpec) -> Fault | None:
        """The reason why a stream cannot have its adapter; None if it can.

        A stream that came from another core goes on with the files that it began with, or not.
        """
        if not spec.adapter or spec.adapter_digest in self._places:
            return None
        if any(each.name == spec.adapter for each in self._served):
            return Fault("diverged", f"the files of the adapter {spec.adapter!r} have changed")
        return Fault("diverged", f"the adapter {spec.adapter!r} is not served any more")

    def place_of(self, spec: RequestSpec) -> int:
        """The place of a stream's adapter; -1: it has none."""
        return self._places[spec.adapter_digest] if spec.adapter else -1
