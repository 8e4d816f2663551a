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
    are not. max_tokens: the most that all of a prompt's items may have together. max_pixels: a
    larger image is made smaller; 0: none is.
    """

    placeholder_id: U32
    why_not: Label = ""
    max_tokens: U32 = 0
    max_pixels: U32 = 0


class MediaProcessConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a media process: the model's folder, and the socket on which it gets images."""

    folder: str
    fd: int


class ImageToPrepare(Struct, array_like=True, frozen=True):
    """An image's file. max_pixels: to which it is made smaller first; 0: as it is."""

    data: bytes
    max_pixels: int = 0


class PixelArray(Struct, array_like=True, frozen=True):
    """An array that a model's own processor makes of an image."""

    name: str  # of the model's argument
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class PreparedImage(Struct, array_like=True, frozen=True):
    """The arrays that a model's own processor makes of an image, or why it makes none."""

    arrays: tuple[PixelArray, ...] = ()
    error: str = ""


Media = Annotated[tuple[MediaItem, ...], Meta(max_length=MAX_MEDIA_ITEMS)]
