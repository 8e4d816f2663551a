"""The ring of plans: slow ranks, a full ring, plans that do not fit, the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.patience import PATIENCE_S
from tests.helpers.sampling_plans import Row, plan_of

from slipstream_core.ranks.bus import NUM_SLOTS, BusStalledError, PlanBus, PlanReader, slot_bytes
from slipstream_core.step.buffer import PlanBytesError, packed_bytes
from slipstream_core.step.plan import StepPlan

SLOT_BYTES = 1 << 14


def plan(step: int, rows: int = 1) -> StepPlan:
    return replace(plan_of([Row()] * rows), step=step)


@contextmanager
def bus_of(num_readers: int, size: int = SLOT_BYTES) -> Iterator[tuple[PlanBus, list[PlanReader]]]:
    bus = PlanBus(num_readers)
    readers = [
        PlanReader(index, bus.memory_fd, doorbell, bus.room_fd)
        for index, doorbell in enumerate(bus.doorbells)
    ]
    try:
        bus.allocate(size)
        yield bus, readers
    finally:
        bus.close()


def test_every_rank_takes_every_plan_in_order() -> None:
    with bus_of(3) as (bus, readers):
        for step in range(3 * NUM_SLOTS):
            bus.put(plan(step, rows=1 + step % 5), timeout_s=PATIENCE_S)
            for reader in readers:
                assert reader.any_waiting
                taken = reader.take()
                assert (taken.step, taken.num_requests) == (step, 1 + step % 5)
                assert not reader.any_waiting
                reader.release()


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=60))
def test_a_plan_stays_as_it_is_until_each_rank_has_released_it(
    moves: list[tuple[int, bool]],
) -> None:
    """Against lists: reader i takes or releases, and the writer writes while there is room."""
    with bus_of(2) as (bus, readers):
        held: list[list[StepPlan]] = [[], []]
        taken, released = [0, 0], [0, 0]
        num_written = 0
        for index, takes in moves:
            while num_written - min(released) < NUM_SLOTS:
                bus.put(plan(num_written), timeout_s=0)
                num_written += 1
            with pytest.raises(BusStalledError):
                bus.put(plan(num_written), timeout_s=0)
            if takes and taken[index] < num_written:
                held[index].append(readers[index].take())
                taken[index] += 1
            elif held[index]:
                readers[index].release()
                held[index].pop(0)
                released[index] += 1
            for at in (0, 1):
                steps = [one.step for one in held[at]]
                assert steps == list(range(released[at], taken[at]))


def test_a_slow_rank_is_waited_for() -> None:
    with bus_of(1) as (bus, [reader]):
        for step in range(NUM_SLOTS):
            bus.put(plan(step), timeout_s=0)
        writer = threading.Thread(target=bus.put, args=(plan(9),), kwargs={"timeout_s": PATIENCE_S})
        writer.start()
        assert writer.is_alive()
        assert reader.take().step == 0
        reader.release()
        writer.join(PATIENCE_S)
        assert not writer.is_alive()
        steps = [reader.take().step for _ in range(NUM_SLOTS)]
        assert steps == [*range(1, NUM_SLOTS), 9]


def test_a_rank_that_never_releases_a_plan_is_an_error_in_the_end() -> None:
    with bus_of(2) as (bus, [reader, _stuck]):
        for step in range(NUM_SLOTS):
            bus.put(plan(step), timeout_s=0)
            reader.take()
            reader.release()
        with pytest.raises(BusStalledError, match="released no plan"):
            bus.put(plan(NUM_SLOTS), timeout_s=0.01)


def test_of_a_plan_that_does_not_fit_no_rank_hears() -> None:
    large = plan(1, rows=500)
    assert packed_bytes(large) > SLOT_BYTES
    with bus_of(1) as (bus, [reader]):
        with pytest.raises(PlanBytesError):
            bus.put(large, timeout_s=0)
        assert not reader.any_waiting
        bus.put(plan(2), timeout_s=0)
        assert reader.take().step == 2


def test_readers_are_woken_before_the_size_is_known() -> None:
    bus = PlanBus(1)
    reader = PlanReader(0, bus.memory_fd, bus.doorbells[0], bus.room_fd)
    try:
        assert not reader.any_waiting
        bus.wake()
        reader.wait()
        bus.allocate(SLOT_BYTES)
        bus.put(plan(7), timeout_s=0)
        assert reader.take().step == 7
    finally:
        bus.close()


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 40))
def test_a_slot_holds_every_usual_plan(rows: int, chunk: int, width: int) -> None:
    whole = plan_of([Row()] * rows)
    tokens = np.zeros(rows + chunk, np.int64)
    largest = replace(
        whole,
        token_ids=tokens,
        gather_slots=tokens,
        positions=tokens,
        kv_slots=tokens,
        table_slots=np.zeros(rows * width, np.int64),
        table_numbers=np.zeros(rows * width, np.int64),
        table_blocks=np.zeros(rows * width, np.int32),
    )
    size = slot_bytes(
        max_num_seqs=rows, max_num_batched_tokens=rows + chunk, max_blocks=width, max_scored=0
    )
    assert packed_bytes(largest) <= size
