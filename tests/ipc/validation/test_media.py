"""The files of images that a Submit brings."""

from __future__ import annotations

import hashlib

import pytest
from msgspec import Raw, structs

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import MAX_MEDIA_ITEMS, ChatMessage, Submit
from slipstream_ipc.validation.media import check_media, media_item, with_digests

ONE, OTHER = media_item("image", b"one"), media_item("image", b"other", max_pixels=64)
TURN = ChatMessage(
    "user", "What is this, beside that?", parts=("What is this", 0, ", beside that?", 1)
)


def submit(*, media: tuple[object, ...] = (ONE, OTHER), **fields: object) -> Submit:
    return Submit(1, bytes(16), Raw(b"\x80"), media=media, **fields)  # type: ignore[arg-type]


def test_a_digest_is_of_the_file_and_of_what_is_made_of_it() -> None:
    """As PROTOCOL.md has it, for clients that make it themselves."""
    expected = hashlib.blake2b(b"one" + bytes(4), digest_size=16, person=b"image").digest()
    assert ONE.digest == expected
    assert media_item("image", b"one", max_pixels=1).digest != expected


def test_items_are_named_once_each_by_the_parts_in_order() -> None:
    check_media(submit(messages=(TURN,)))
    check_media(submit(token_ids=bytes(4)))
    check_media(submit(media=(), messages=(ChatMessage("user", "hi"),)))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (submit(text="hi"), "media"),
        (submit(media=(ONE,) * (MAX_MEDIA_ITEMS + 1), token_ids=bytes(4)), "media"),
        (submit(media=(ONE, structs.replace(ONE, data=b"")), token_ids=bytes(4)), "media[1]"),
        (submit(media=(structs.replace(ONE, data=b"two"),), token_ids=bytes(4)), "media[0]"),
        (submit(media=(structs.replace(ONE, max_pixels=9),), token_ids=bytes(4)), "media[0]"),
        (submit(media=(ONE,), messages=(TURN,)), "media"),
        (submit(media=(), messages=(TURN,)), "media"),
        (submit(messages=(structs.replace(TURN, content="What?"),)), "messages[0]"),
        (submit(messages=(ChatMessage("user", "", parts=(1, 0)),)), "media"),
        (submit(messages=(ChatMessage("user", "nothing named"),)), "media"),
    ],
)
def test_other_media_are_refused_by_name(given: Submit, field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_media(given)
    assert refused.value.fault.field == field


def test_turns_with_other_files_are_other_turns() -> None:
    """By their digests, as keys of prompts are made of them."""
    same = with_digests(TURN, (ONE, OTHER))
    assert same == with_digests(TURN, (media_item("image", b"one"), OTHER))
    assert same != with_digests(TURN, (OTHER, ONE))
    assert with_digests(ChatMessage("user", "hi"), ()) == ChatMessage("user", "hi")
