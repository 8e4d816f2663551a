"""The places of images among a prompt's tokens. Pure.

A prompt has a placeholder for each row of features, in the order of its items. They are found once,
when the request is admitted, and their number has to be that of the rows: so a placeholder that is
none of an image's shifts no image. From then on the places count, and ids do not: one that is
sampled, or stands in a prompt without images, is a token as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream_core.step.plan import ItemFeatures, MediaPlan
from slipstream_ipc.arrays import Int32s, Int64s, UInt32s
from slipstream_ipc.errors import BadRequest, Summary


@dataclass(frozen=True, slots=True, eq=False)
class MediaPlaces:
    """A prompt's images and where they are: P runs of placeholders, each of one image.

    digests, features: of its I items. rope: the positions for rotary embeddings up to the end of
    the last run, where a model has three to a token; None where it has one.
    rope_delta: how far those behind the last run are from a token's number.
    """

    digests: tuple[bytes, ...]
    features: tuple[ItemFeatures, ...]
    items: Int64s  # [P]
    firsts: Int64s  # [P] first token
    counts: Int64s  # [P] tokens
    starts: Int64s  # [P] first row of the item's features
    rope: Int32s | None = None  # [3, end]
    rope_delta: int = 0

    @property
    def end(self) -> int:
        """The number of tokens up to the last placeholder of an image, with it."""
        return int(self.firsts[-1] + self.counts[-1])

    def block_marks(self, block_size: int, start: int, stop: int) -> list[bytes]:
        """The bytes that tell the blocks [start, stop) of a prompt apart, besides their tokens: of
        each run in a block its item's digest and, as u32, the row of the first placeholder there.
        """
        marks = [b""] * (stop - start)
        ends = self.firsts + self.counts
        for block in range(start, min(stop, -(-self.end // block_size))):
            begin = block * block_size
            found = np.flatnonzero((ends > begin) & (self.firsts < begin + block_size))
            marks[block - start] = b"".join(
                self.digests[self.items[run]]
                + int(self.starts[run] + max(0, begin - self.firsts[run])).to_bytes(4, "little")
                for run in found.tolist()
            )
        return marks


def places_of(
    prompt: UInt32s,
    placeholder_id: int,
    digests: Sequence[bytes],
    features: Sequence[ItemFeatures],
) -> MediaPlaces:
    """The places of these items in a prompt.

    Raises BadRequest unless there is a placeholder for each row of their features, and any.
    """
    tokens = np.flatnonzero(prompt == placeholder_id)
    check_num_rows(len(tokens), placeholder_id, features)
    if not len(tokens):
        given = Summary(f"{len(features)} images of which the model makes no row")
        raise BadRequest("media", given, "images that it makes tokens of")
    lens = np.array([len(each) for each in features], np.int64)
    ends = np.cumsum(lens)
    # a run ends where the next placeholder is of another item, or not the next token
    begins = np.ones(len(tokens), np.bool_)
    begins[1:] = np.diff(tokens) != 1
    begins[(ends - lens)[lens > 0]] = True
    at = np.flatnonzero(begins)
    items = np.searchsorted(ends, at, side="right")
    return MediaPlaces(
        tuple(digests),
        tuple(features),
        items=items,
        firsts=tokens[at],
        counts=np.diff(at, append=len(tokens)),
        starts=at - (ends - lens)[items],
    )


def check_num_rows(
    num_placeholders: int, placeholder_id: int, features: Sequence[ItemFeatures]
) -> None:
    """Raises BadRequest unless there is a placeholder for each row."""
    num_rows = sum(len(each) for each in features)
    if num_placeholders != num_rows:
        given = Summary(f"{num_placeholders} placeholders (token {placeholder_id}) in the prompt")
        raise BadRequest("media", given, f"{num_rows}, as {len(features)} images have rows")


def media_plan(
    rows: Sequence[MediaPlaces | None],
    starts: Int64s,
    counts: Int64s,
    positions: Int64s,
    deltas: Int64s,
) -> MediaPlan | None:
    """The images in a step whose rows [R] compute `counts` tokens each, from `starts` on; None if
    all tokens are behind their rows' images.

    positions: [T] of the step's tokens. deltas: [R] see `MediaPlaces.rope_delta`.
    """
    offsets = np.cumsum(counts) - counts
    tokens: list[Int64s] = []
    features: list[ItemFeatures] = []
    cuts: list[tuple[int, int]] = []
    rope: npt.NDArray[np.int64] | None = None
    has_any = False
    for row, places in enumerate(rows):
        if places is None or starts[row] >= places.end:
            continue
        has_any = True
        begin, end = int(starts[row]), int(starts[row] + counts[row])
        offset = int(offsets[row])
        if places.rope is not None:
            if rope is None:
                rope = np.tile(positions + np.repeat(deltas, counts), (3, 1))
            within = min(end, places.end) - begin
            rope[:, offset : offset + within] = places.rope[:, begin : begin + within]
        for run, first in enumerate(places.firsts.tolist()):
            low, high = max(first, begin), min(first + int(places.counts[run]), end)
            if low < high:
                tokens.append(np.arange(low, high) + (offset - begin))
                features.append(places.features[places.items[run]])
                cuts.append((int(places.starts[run]) + low - first, high - low))
    if not has_any:
        return None
    ranges = np.array(cuts, np.int64).reshape(-1, 2)
    return MediaPlan(
        tokens=np.concatenate([*tokens, np.empty(0, np.int64)]),
        features=tuple(features),
        starts=ranges[:, 0],
        counts=ranges[:, 1],
        rope=rope,
    )
