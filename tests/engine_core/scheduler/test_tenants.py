"""Cached blocks are found under the root of their admission alone, through a whole core."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.helpers.admits import with_fields

PROMPT = [(7 * i + 5) % 31 for i in range(100)]
FULL = 96  # tokens of its blocks


@pytest.mark.parametrize(
    ("roots", "num_hits"),
    [
        ([b"", b""], FULL),
        ([b"a", b"a"], FULL),
        ([b"a", b"b"], 0),
        ([b"", b"a"], 0),
        ([b"a", b"b", b"a"], FULL),
    ],
)
def test_blocks_are_found_under_their_root_alone(
    make_core: Callable[..., object], roots: list[bytes], num_hits: int
) -> None:
    box = make_core()
    worker = box.worker()
    outputs = []
    for root in roots:
        held = worker.admit(PROMPT, prefix_root=root)
        box.until(lambda: held.is_over)  # noqa: B023  (it is over before the next one)
        outputs.append(held.token_ids)
    assert box.core.scheduler.prefix_cache_hits == num_hits
    assert box.core.scheduler.prefix_cache_queries == len(roots) * len(PROMPT)
    assert all(output == outputs[0] for output in outputs)


def test_switched_off_nothing_is_found(make_core: Callable[..., object]) -> None:
    box = make_core(enable_prefix_caching=False)
    worker = box.worker()
    for _ in range(2):
        held = worker.admit(PROMPT)
        box.until(lambda: held.is_over)  # noqa: B023
    assert box.core.scheduler.prefix_cache_hits == 0


def test_another_salt_under_the_same_id_is_another_request(
    make_core: Callable[..., object],
) -> None:
    box = make_core()
    worker = box.worker()
    held = worker.admit(PROMPT, cache_salt="a")
    box.until(lambda: held.is_over)
    other = worker.send_admit(with_fields(held.admit, cache_salt="b"))
    box.until(lambda: other.fault is not None)
    assert other.fault.code == "conflict"
