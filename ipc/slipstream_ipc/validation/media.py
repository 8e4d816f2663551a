"""Makes the items of a prompt's media, and checks those of a Submit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec import structs

from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import (
    MAX_MEDIA_ITEMS,
    ChatMessage,
    MediaItem,
    MediaKind,
    MediaSize,
    ModelCard,
    Submit,
)
from slipstream_ipc.validation.image_header import fitted_size, image_header


def media_digest(kind: MediaKind, data: bytes, max_pixels: int = 0) -> bytes:
    """The digest of an item, 16 bytes: items with an equal one are the same to a model."""
    hashed = hashlib.blake2b(data, digest_size=16, person=kind.encode())
    hashed.update(max_pixels.to_bytes(4, "little"))
    return hashed.digest()


def media_item(kind: MediaKind, data: bytes, max_pixels: int = 0) -> MediaItem:
    """An item of a file's bytes. max_pixels: see `MediaItem`."""
    return MediaItem(kind, media_digest(kind, data, max_pixels), data, max_pixels)


def pixel_limit(item: MediaItem, card: ModelCard) -> int:
    """The most pixels of an item, of its own and of the model's; 0: no limit."""
    own = 0 if card.media is None else card.media.max_pixels
    return min(filter(None, (item.max_pixels, own)), default=0)


def sizes_of(media: Sequence[MediaItem], card: ModelCard | None = None) -> tuple[MediaSize, ...]:
    """The sizes of images as a model's own processor is shown them, from their files' headers.
    card: None leaves out the model's limit.

    Raises BadRequest, which names `media[i]`, for a file that is no picture of a known format.
    """
    sizes = []
    for index, item in enumerate(media):
        header = image_header(item.data, f"media[{index}]")
        limit = item.max_pixels if card is None else pixel_limit(item, card)
        size = fitted_size(header.width, header.height, limit)
        sizes.append(MediaSize(item.kind, *size))
    return tuple(sizes)


def limited_sizes(sizes: Sequence[MediaSize], card: ModelCard) -> tuple[MediaSize, ...]:
    """Sizes that a client has told, with the model's limit applied."""
    most = 0 if card.media is None else card.media.max_pixels
    return tuple(
        MediaSize(size.kind, *fitted_size(size.width, size.height, most)) if size.height else size
        for size in sizes
    )


def media_bytes(media: Sequence[MediaItem]) -> int:
    """The size of the files."""
    return sum(len(item.data) for item in media)


def with_digests(message: ChatMessage, media: Sequence[MediaItem]) -> ChatMessage:
    """A message whose items are their digests, as text: equal ones say and show the same."""
    if message.parts is None:
        return message
    parts = tuple(
        part if isinstance(part, str) else f"{part}:{media[part].digest.hex()}"
        for part in message.parts
        if isinstance(part, str) or part < len(media)
    )
    return structs.replace(message, parts=parts)


def check_media(submit: Submit) -> None:
    """Check the media of a Submit, and the parts of its messages. Raises: BadRequest."""
    media = submit.media
    if len(media) > MAX_MEDIA_ITEMS:
        raise BadRequest("media", Summary(f"{len(media)} items"), f"at most {MAX_MEDIA_ITEMS}")
    for index, item in enumerate(media):
        if not item.data:
            raise BadRequest(f"media[{index}]", Summary("0 bytes"), "a file")
        if item.digest != media_digest(item.kind, item.data, item.max_pixels):
            raise BadRequest(f"media[{index}]", Summary("another digest"), "that of its file")
    if media and submit.text is not None:
        raise BadRequest("media", Summary("a text"), "messages, or token ids with placeholders")
    check_parts(submit.messages, len(media))


def check_parts(messages: Sequence[ChatMessage], num_items: int) -> None:
    """Check the parts of messages with so many items. Raises: BadRequest."""
    named: list[int] = []
    for index, message in enumerate(messages):
        if message.parts is None:
            continue
        texts = [part for part in message.parts if isinstance(part, str)]
        if "".join(texts) != message.content:
            given = Summary("parts that differ from its content")
            raise BadRequest(f"messages[{index}]", given, "the content as the texts of the parts")
        named += [part for part in message.parts if not isinstance(part, str)]
    if messages and named != [*range(num_items)]:
        given = Summary(f"{num_items} items, named {len(named)} times")
        raise BadRequest("media", given, "each item once among the parts of messages, in order")


def why_no_media(card: ModelCard) -> str:
    """The reason why a model takes no images; empty if it does."""
    if card.media is None:
        return f"{card.name} takes no images"
    return card.media.why_not
