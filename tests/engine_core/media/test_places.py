"""The places of images among tokens, against a walk over every token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_core.media.feature_cache import FeatureCache
from slipstream_core.media.places import MediaPlaces, media_plan, places_of
from slipstream_ipc.errors import BadRequest

HOLDER = 7


class Rows:
    """Features of so many rows."""

    def __init__(self, num: int) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[Rows]]:
    """Texts and images, whose rows may have breaks between them or none to the next image."""
    ids: list[int] = []
    items: list[Rows] = []
    for _ in range(draw(st.integers(1, 3))):
        ids += [1] * draw(st.integers(0, 3))
        runs = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
        for number, run in enumerate(runs):
            ids += [2] * bool(number) + [HOLDER] * run
        items.append(Rows(sum(runs)))
    return ids + [1] * draw(st.integers(0, 3)), items


def walked(ids: list[int], items: list[Rows]) -> dict[int, tuple[int, int]]:
    """By token: the image and the row that it stands for."""
    rows = [(item, row) for item, rows in enumerate(items) for row in range(len(rows))]
    tokens = [at for at, token in enumerate(ids) if token == HOLDER]
    return dict(zip(tokens, rows, strict=True))


def made(ids: list[int], items: list[Rows]) -> MediaPlaces:
    digests = [bytes([number]) * 16 for number in range(len(items))]
    return places_of(np.array(ids, np.uint32), HOLDER, digests, items)


@given(prompts(), st.data())
def test_a_step_has_the_rows_of_its_tokens(
    prompt: tuple[list[int], list[Rows]], data: st.DataObject
) -> None:
    """Of a row with images and one without, whatever part of the prompt the step computes."""
    ids, items = prompt
    places, expected = made(ids, items), walked(ids, items)
    start = data.draw(st.integers(0, len(ids) - 1))
    count = data.draw(st.integers(1, len(ids) - start))
    is_first = data.draw(st.booleans())
    rows = [places, None] if is_first else [None, places]
    starts = np.array([start, 40] if is_first else [40, start])
    counts = np.array([count, 3] if is_first else [3, count])
    positions = np.concatenate([np.arange(n) + s for s, n in zip(starts, counts, strict=True)])
    plan = media_plan(rows, starts, counts, positions, np.zeros(2, np.int64))
    if start >= places.end:
        assert plan is None
        return
    assert plan is not None
    assert plan.rope is None
    got = [
        (items.index(features), first + row)  # type: ignore[arg-type]
        for features, first, num in zip(
            plan.features, plan.starts.tolist(), plan.counts.tolist(), strict=True
        )
        for row in range(num)
    ]
    offset = 0 if is_first else 3
    found = {at - offset + start: row for at, row in zip(plan.tokens.tolist(), got, strict=True)}
    assert found == {at: row for at, row in expected.items() if start <= at < start + count}


@given(prompts(), st.integers(1, 6))
def test_blocks_are_marked_by_the_images_in_them(
    prompt: tuple[list[int], list[Rows]], size: int
) -> None:
    """Each by what it holds of each, and blocks without any by nothing."""
    ids, items = prompt
    places, expected = made(ids, items), walked(ids, items)
    num = len(ids) // size + 1
    marks = places.block_marks(size, 0, num)
    for block, mark in enumerate(marks):
        own = [expected.get(at) for at in range(block * size, (block + 1) * size)]
        firsts = [
            row
            for at, row in enumerate(own)
            if row is not None and (at == 0 or own[at - 1] is None or own[at - 1][0] != row[0])  # type: ignore[index]
        ]
        assert mark == b"".join(
            bytes([item]) * 16 + row.to_bytes(4, "little") for item, row in firsts
        )
    for start in range(num):
        assert places.block_marks(size, start, num) == marks[start:]


@given(prompts(), st.integers(-3, 3).filter(bool))
def test_another_number_of_placeholders_is_refused(
    prompt: tuple[list[int], list[Rows]], more: int
) -> None:
    """A text that says the placeholder would shift what stands behind it."""
    ids, items = prompt
    other = [*ids, *[HOLDER] * more] if more > 0 else ids[ids.index(HOLDER) + 1 :]
    with pytest.raises(BadRequest, match=r"^media: got \d+ placeholders \(token 7\)"):
        made(other, items)


def test_positions_are_the_images_up_to_their_end_and_a_delta_behind() -> None:
    rope = np.arange(12, dtype=np.int32).reshape(3, 4) + 50
    items = [Rows(2)]
    places = made([1, 1, HOLDER, HOLDER, 1, 1], items)
    with_rope = MediaPlaces(
        *(places.digests, places.features, places.items, places.firsts, places.counts),
        starts=places.starts,
        rope=rope,
        rope_delta=-1,
    )
    plan = media_plan(
        [None, with_rope],
        np.array([9, 1]),
        np.array([1, 5]),
        np.array([9, 1, 2, 3, 4, 5]),
        np.array([0, -1]),
    )
    assert plan is not None
    assert plan.rope is not None
    assert plan.rope[0].tolist() == [9, 51, 52, 53, 3, 4]
    assert plan.rope[2].tolist() == [9, 59, 60, 61, 3, 4]


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), max_size=40))
def test_features_are_held_once_by_a_tenant_and_the_oldest_go(
    actions: list[tuple[int, bool, bool]],
) -> None:
    cache, all_of = FeatureCache(9), [Rows(num + 1) for num in range(5)]
    tenants = b"one", b"two"
    holders: list[tuple[bytes, int, MediaPlaces]] = []
    kept: list[int] = []
    for number, is_release, is_second in actions:
        each, tenant = all_of[number], tenants[is_second]
        if is_release and number < len(holders):
            cache.release(holders.pop(number)[2])
        elif not is_release:
            assert (cache.get(bytes([number])) is each) == (number in kept)
            cache.put(bytes([number]), each)
            places = made([HOLDER] * 2 * len(each), [each, each])
            cache.hold(places, tenant)
            holders.append((tenant, number, places))
            kept = [other for other in kept if other != number] + [number]
            while sum(other + 1 for other in kept) > 9:
                kept.pop(0)
        held = {(holder, num) for holder, num, _ in holders}
        assert cache.num_held == sum(num + 1 for _, num in held)
        for holder in tenants:
            assert cache.num_held_by(holder) == sum(num + 1 for of, num in held if of == holder)
        assert cache.num_kept == sum(num + 1 for num in kept) <= 9


def test_images_of_which_no_row_is_made_are_refused() -> None:
    with pytest.raises(BadRequest, match="2 images of which the model makes no row"):
        made([1, 2], [Rows(0), Rows(0)])
