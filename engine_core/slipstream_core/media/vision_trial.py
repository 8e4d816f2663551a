"""A trial of a model's way with images, when it is loaded: a prompt with an image, cut within it,
beside a prompt with a placeholder that is none, against transformers' own forward of each.

A model that differs (an image's tokens see each other, say, or the text behind it) is served as
text. Only the first layers run, which have every kind of layer that such a model has.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from slipstream_core.attention.interface import AttentionParams
from slipstream_core.media.media_client import Arrays
from slipstream_core.media.places import MediaPlaces, media_plan, places_of
from slipstream_core.media.vision_model import Features, VisionModel
from slipstream_ipc.arrays import UInt32s

_MAX_LAYERS = 6
_SIZE = 56, 40  # pixels
_TOLERANCES = {torch.float32: 1e-3}  # relative to the largest logit; of narrower types 0.1


class Sequences:
    """An attention context of sequences in one batch, each of which sees its own past alone.

    begin: the lengths of the sequences in the next forward, and their numbers.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, int]] = []  # number, tokens
        self._past: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, *rows: tuple[int, int]) -> None:
        """The next forward's sequences: the number of each, and its tokens there."""
        self._rows = list(rows)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Shapes as in AttentionContext.attend. Raises ValueError for sinks, chunks and latents."""
        if params.sinks is not None or params.chunk is not None or params.is_latent:
            raise ValueError("it attends in a way that is not known with images")
        outputs, begin = [], 0
        for number, num in self._rows:
            own = slice(begin, begin + num)
            begin += num
            keys, values = key[own], value[own]
            if (layer, number) in self._past:
                past = self._past[layer, number]
                keys, values = torch.cat([past[0], keys]), torch.cat([past[1], values])
            self._past[layer, number] = keys, values
            outputs.append(_causal(query[own], keys, values, params))
        return torch.cat(outputs)


def _causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Attention of a sequence's last tokens; [T, heads, dim]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float()) * params.scale
    if params.softcap is not None:
        scores = params.softcap * (scores / params.softcap).tanh()
    at = torch.arange(len(keys))
    own = at[len(keys) - len(query) :, None]
    hidden = at > own
    if params.window is not None:
        hidden = hidden | (at <= own - params.window)
    scores = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", scores, values.float()).to(query.dtype).contiguous()


def trial_image() -> bytes:
    """A small PNG of noise."""
    from PIL import Image

    width, height = _SIZE
    pixels = np.random.default_rng(1).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def why_no_images(vision: VisionModel, arrays: Arrays) -> str:
    """The reason why a model's images are not served; empty if they are. arrays: of `trial_image`.

    The model's language part still runs by itself.
    """
    module = vision.module
    try:
        with torch.inference_mode(), _first_layers(module):
            features = vision.encode(arrays)
            if not len(features):
                return "an image has no features"
            with_image, without = _prompts(vision, len(features))
            ours = _ours(vision, features, with_image, without)
            own = _own(vision, arrays, with_image, without)
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        return f"a trial of its images failed ({type(error).__name__}: {said})"
    tolerance = _TOLERANCES.get(module.dtype, 0.1)
    for each, expected, what in zip(ours, own, ("with an image", "beside one"), strict=True):
        if not (each - expected).abs().max() <= tolerance * expected.abs().max():
            return f"a prompt {what} is computed otherwise by transformers' own forward"
    return ""


def _prompts(vision: VisionModel, num_rows: int) -> tuple[UInt32s, UInt32s]:
    vocab = vision.module.config.get_text_config().vocab_size
    holder = vision.placeholder_id
    text = [token for token in (5, 6, 7, 8, 9, 10) if token < vocab and token != holder]
    with_image = [*text[:2], *[holder] * num_rows, *text[2:]]
    return np.array(with_image, np.uint32), np.array([text[0], holder, text[1]], np.uint32)


def _ours(
    vision: VisionModel, features: Features, with_image: UInt32s, without: UInt32s
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last logits of both prompts, the first one cut within its image."""
    places = vision.with_rope(
        with_image, places_of(with_image, vision.placeholder_id, [b""], [features])
    )
    context = Sequences()
    cut = int(places.firsts[0]) + max(1, len(features) // 2)
    _step(vision, context, [(places, with_image[:cut], 0)])
    rest = [(places, with_image[cut:], cut), (None, without, 0)]
    logits = _step(vision, context, rest)
    return logits[0], logits[1]


def _step(
    vision: VisionModel,
    context: Sequences,
    rows: list[tuple[MediaPlaces | None, UInt32s, int]],
) -> torch.Tensor:
    """The logits behind each row's tokens; a row: its places, its tokens, and its first one."""
    counts = np.array([len(ids) for _, ids, _ in rows])
    starts = np.array([start for *_, start in rows])
    ids = np.concatenate([each.astype(np.int64) for _, each, _ in rows])
    positions = np.concatenate(
        [np.arange(num) + start for num, start in zip(counts, starts, strict=True)]
    )
    deltas = np.array([0 if places is None else places.rope_delta for places, *_ in rows])
    context.begin(*enumerate(counts.tolist()))
    keep = torch.from_numpy(np.cumsum(counts) - 1)
    plan = media_plan([places for places, *_ in rows], starts, counts, positions, deltas)
    if plan is None:
        raise ValueError("a step without an image")
    return vision.forward(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        keep,
        context,
        plan,
        torch.from_numpy(plan.tokens),
    )


def _own(
    vision: VisionModel, arrays: Arrays, with_image: UInt32s, without: UInt32s
) -> list[torch.Tensor]:
    """The last logits of both prompts by transformers' own forward, each alone."""
    module = vision.module
    taken = vision.arguments_of(module.forward)
    last = []
    with _own_attention(module):
        for prompt, inputs in ((with_image, vision.inputs(arrays)), (without, {})):
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            types = (ids == vision.placeholder_id).long() * bool(inputs)
            given = dict.fromkeys(("mm_token_type_ids", "token_type_ids"), types)
            named = {name: each for name, each in (given | inputs).items() if name in taken}
            logits = module(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **named
            ).logits
            last.append(logits[0, -1])
    return last


@contextlib.contextmanager
def _own_attention(module: Any) -> Iterator[None]:
    """While it is entered, all parts of the module attend and mask as transformers has it."""
    parts = [each.config for each in module.modules() if hasattr(each, "config")]
    before = {id(config): (config, config._attn_implementation) for config in parts}
    for config, _ in before.values():
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for config, name in before.values():
            config._attn_implementation = name


@contextlib.contextmanager
def _first_layers(module: Any) -> Iterator[None]:
    """While it is entered, the language part has its first layers alone."""
    decoder = module.get_decoder()
    layers = decoder.layers
    decoder.layers = layers[:_MAX_LAYERS]
    try:
        yield
    finally:
        decoder.layers = layers
