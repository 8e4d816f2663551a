"""The registry of tags against the messages that carry them."""

from __future__ import annotations

from typing import get_args

from msgspec import Struct

from slipstream_ipc.messages import (
    ClientToWorker,
    CoreToWorker,
    WorkerToClient,
    WorkerToCore,
    handshake,
    tags,
)

DIRECTIONS = [
    ([*range(10, 20), *range(80, 90)], ClientToWorker),
    ([*range(20, 30), *range(70, 80)], WorkerToClient),
    ([*range(30, 40), *range(60, 70)], WorkerToCore),
    (range(40, 60), CoreToWorker),
]
REGISTRY = {name: value for name, value in vars(tags).items() if isinstance(value, int)}


def tag_of(kind: type[Struct]) -> int:
    tag = kind.__struct_config__.tag
    assert isinstance(tag, int), kind
    return tag


def test_a_tag_is_taken_once() -> None:
    assert len(set(REGISTRY.values())) == len(REGISTRY)


def test_every_message_has_the_tag_of_its_name_and_every_tag_a_message() -> None:
    kinds = {kind for _, union in DIRECTIONS for kind in get_args(union)}
    tag_by_name = {kind.__name__.upper(): tag_of(kind) for kind in kinds}
    assert tag_by_name == {name.replace("_", ""): tag for name, tag in REGISTRY.items()}


def test_each_direction_has_its_tags_beside_those_of_every_hop() -> None:
    for its_own, union in DIRECTIONS:
        for kind in get_args(union):
            is_control = kind.__module__ == handshake.__name__
            assert tag_of(kind) in (range(10) if is_control else its_own), kind
