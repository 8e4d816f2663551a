"""The parts of a prompt that are no text: the files of its images."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from slipstream_ipc.messages.fields import U32, Label

MAX_MEDIA_ITEMS = 128  # of a request; its size bounds it further

MediaKind = Literal["image"]


class MediaItem(Struct, array_like=True, frozen=True):
    """A file as its sender has it; whoever computes decodes it. max_pixels: to which it is made
    smaller; 0: as the model's own settings say. digest: `media_digest`, by which it is known.
    """

    kind: MediaKind
    digest: Annotated[bytes, Meta(max_length=16)]
    data: bytes
    max_pixels: U32 = 0


class MediaSize(Struct, array_like=True, frozen=True):
    """The size of an image in pixels, as it is shown to the model's own processor."""

    kind: MediaKind
    width: U32
    height: U32


class MediaCard(Struct, array_like=True, frozen=True):
    """The images that a model takes. placeholder_id: the token that stands in a prompt once for
    each row that the model makes of an item. why_not: the reason why they are refused; empty: they
    are not. max_tokens: the most that an item may have; 0: as many as a prompt.
    """

    placeholder_id: U32
    why_not: Label = ""
    max_tokens: U32 = 0


Media = Annotated[tuple[MediaItem, ...], Meta(max_length=MAX_MEDIA_ITEMS)]
