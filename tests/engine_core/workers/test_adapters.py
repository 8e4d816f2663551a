"""Versions of adapters against a model that knows of each stream what it has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream_core.adapters.adapter_error import AdapterError
from slipstream_core.workers.adapters import Adapters
from slipstream_ipc.messages import RequestSpec, SamplingParams

NUM_PLACES = 3
MOST_BYTES = 30


@dataclass(frozen=True)
class Read:
    """An adapter that was read."""

    digest: bytes
    num_bytes: int = 10
    warning: str = ""


class Places:
    """In place of a runner's memory."""

    def __init__(self) -> None:
        self.held: dict[int, Read] = {}

    def put(self, place: int, adapter: Read) -> None:
        assert place not in self.held
        self.held[place] = adapter

    def clear(self, place: int) -> None:
        del self.held[place]

    def num_bytes(self, place: int) -> int:
        return self.held[place].num_bytes


def new_adapters(store: Any) -> Adapters:
    return Adapters(num_places=NUM_PLACES, store=store)


def has_room(adapters: Adapters, name: str, read: Any) -> bool:
    try:
        adapters.check_room(name, read, MOST_BYTES)
    except AdapterError:
        return False
    return True


def spec_of(name: str, digest: bytes) -> RequestSpec:
    return RequestSpec(SamplingParams(), adapter=name, adapter_digest=digest)


CHANGES = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("xy"), st.sampled_from([b"1", b"2", b"3"])),
    st.tuples(st.just("forget"), st.sampled_from("xy")),
    st.tuples(st.just("begin"), st.sampled_from("xy")),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("launch")),
    st.tuples(st.just("collect")),
    st.tuples(st.just("wait"), st.integers(1, 20)),
)


# what is unloaded makes room at once, though a step is always in flight
@example(
    [
        *[it for each in "123" for it in (("put", "x", each.encode()), ("forget", "x"))],
        ("launch",),
        ("put", "y", b"1"),
    ]
)
@given(st.lists(CHANGES, max_size=40))
def test_a_place_keeps_what_its_streams_and_steps_have(changes: list[Any]) -> None:
    store, served = Places(), dict[str, bytes]()
    adapters = new_adapters(store)
    streams: list[tuple[RequestSpec, int]] = []  # with their places
    steps: list[list[tuple[int, Read]]] = []  # in flight: what each reads
    now, launched, collected = 0.0, 0, 0
    freed = 0  # the last step that was launched when a place lost its last use
    for what, *given_ in changes:
        if what == "put":
            name, digest = given_
            if not has_room(adapters, name, Read(digest)):
                assert len(store.held) == NUM_PLACES
                if collected >= freed:  # no step can read what no stream has
                    used = {(spec.adapter, spec.adapter_digest) for spec, _ in streams}
                    assert len(used | set(served.items())) == NUM_PLACES
                continue
            before = served.get(name)
            of_before = sum(
                1 for spec, _ in streams if (spec.adapter, spec.adapter_digest) == (name, before)
            )
            num = adapters.put(name, "/", Read(digest), now)  # type: ignore[arg-type]
            assert num == (0 if before in (None, digest) else of_before)
            freed = launched
            served[name] = digest
        elif what == "forget" and given_[0] in served:
            name = given_[0]
            adapters.forget(name, now)
            del served[name]
            freed = launched
        elif what == "begin" and given_[0] in served:
            spec = spec_of(given_[0], served[given_[0]])
            assert adapters.objection(spec) is None
            adapters.hold(spec)
            streams.append((spec, adapters.place_of(spec)))
        elif what == "end" and given_[0] < len(streams):
            spec, _ = streams.pop(given_[0])
            adapters.release(spec)
            freed = launched
        elif what == "launch":
            launched += 1
            adapters.launched_step = launched
            steps.append([(place, store.held[place]) for _, place in streams])
        elif what == "collect" and steps:
            for place, read in steps.pop(0):
                assert store.held[place] is read
            collected += 1
            adapters.collected_step = collected
        elif what == "wait":
            now += given_[0]
            for _ in adapters.drop_unused(now):
                pass
        assert {ref.name: ref.digest for ref in adapters.served} == served
        for step in steps:
            assert all(store.held[place] is read for place, read in step)
        for spec, place in streams:
            assert adapters.place_of(spec) == place
            assert store.held[place].digest == spec.adapter_digest
            assert adapters.name_at(place) == spec.adapter
        held = Counter(read.digest for read in store.held.values())
        known = Counter(ref.digest for ref in (*adapters.served, *adapters.retired))
        assert held == known
    for spec, _ in streams:
        adapters.release(spec)
    adapters.collected_step = launched
    for _ in adapters.drop_unused(now + 100):
        pass
    assert len(store.held) == len(served)
    assert not adapters.retired


def test_what_is_retired_lingers_for_registrations_on_their_way() -> None:
    store = Places()
    adapters = new_adapters(store)
    adapters.put("x", "/", Read(b"1"), 0.0)  # type: ignore[arg-type]
    adapters.forget("x", 5.0)
    assert adapters.objection(spec_of("x", b"1")) is None
    assert not list(adapters.drop_unused(14.9))
    assert [ref.digest for ref in adapters.drop_unused(15.0)] == [b"1"]
    refused = adapters.objection(spec_of("x", b"1"))
    assert refused is not None
    assert refused.code == "diverged"
    assert not store.held


def test_memory_in_all_is_bounded() -> None:
    adapters = new_adapters(Places())
    adapters.put("x", "/", Read(b"1", 20), 0.0)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match=r"free: 0\.0 MB.*loaded: 'x'") as caught:
        adapters.check_room("y", Read(b"2", 20), MOST_BYTES)  # type: ignore[arg-type]
    assert caught.value.why == "no_room"
    # the same files under the same name take nothing more
    adapters.check_room("x", Read(b"1", 20), MOST_BYTES)  # type: ignore[arg-type]
    adapters.forget("x", 1.0)
    adapters.check_room("y", Read(b"2", 20), MOST_BYTES)  # type: ignore[arg-type]
