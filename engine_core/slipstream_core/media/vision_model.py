"""The part of a model that sees: its towers, which encode an image, and the forward of a step with
images, in transformers' own module.

- `encode` and the steps' forwards may run at the same time, on different threads.
- Where images go is what the plan says. A model looks for its placeholders among the ids; it is
  given a mask of the plan's places instead (`_Masked`), so that a placeholder that was sampled, or
  that another prompt has as a token, is one token more and no place of an image.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers.utils.generic import ModelOutput

from slipstream_core.media.media_client import Arrays
from slipstream_core.media.places import MediaPlaces
from slipstream_core.step.plan import MediaPlan
from slipstream_ipc.arrays import Int32s, UInt32s
from slipstream_ipc.errors import BadRequest, Summary

_MERGED = "mm_encoder_outputs"  # the argument of transformers' forwards that takes features
_MASK = "get_placeholder_mask"
_output: Any = ModelOutput  # missing from transformers' annotations


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """An image as the language part of a model sees it.

    rows: [N, width], each in the place of a placeholder. deeper: the same for further layers, whose
    inputs they are added to. is_list: the model gives its rows in a list. geometry: the arrays of
    its size, for positions.
    """

    rows: torch.Tensor
    deeper: tuple[torch.Tensor, ...] = ()
    is_list: bool = False
    geometry: Arrays = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)


def placeholder_of(config: Any) -> int | None:
    """The token that stands for an image in a configuration's prompts; None if there is none."""
    for name in ("image_token_id", "image_token_index"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return None


class VisionModel:
    """A loaded module of transformers whose towers are there."""

    def __init__(self, module: Any) -> None:
        """Raises ValueError for a model that takes no images in a way that is known here."""
        base: Any = getattr(module, "model", None)
        placeholder = placeholder_of(module.config)
        if placeholder is None or not hasattr(base, "get_image_features"):
            raise ValueError("it has no placeholder and no features of images")
        if not 0 <= placeholder < module.config.get_text_config().vocab_size:
            raise ValueError(f"its placeholder {placeholder} is no token of its vocabulary")
        if _MERGED not in _parameters(module.forward):
            raise ValueError(f"its forward takes no {_MERGED}, with this version of transformers")
        self.placeholder_id = placeholder
        self.module = module
        self._base = base
        self._arguments = _parameters(base.get_image_features) - {"kwargs"}
        self._rope_index: Callable[..., Any] | None = getattr(base, "get_rope_index", None)

    @staticmethod
    def arguments_of(function: Callable[..., Any]) -> set[str]:
        """The names that a function of the module takes."""
        return _parameters(function)

    def inputs(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """The arrays of a processor that the towers take, as tensors."""
        made = {}
        for name, array in arrays.items():
            if name in self._arguments:
                tensor = torch.from_numpy(array.copy())
                made[name] = tensor.to(self.module.dtype) if array.dtype.kind == "f" else tensor
        if "pixel_attention_mask" in made:
            made["pixel_attention_mask"] = made["pixel_attention_mask"].bool()
        return made

    def encode(self, arrays: Arrays) -> Features:
        """The features of one image. Raises whatever transformers raises."""
        with torch.inference_mode():
            made = self._base.get_image_features(**self.inputs(arrays), return_dict=True)
        rows, is_list = _rows_of(made.pooler_output)
        deeper = getattr(made, "deepstack_features", None) or ()
        taken = set() if self._rope_index is None else _parameters(self._rope_index)
        geometry = {name: array for name, array in arrays.items() if name in taken}
        return Features(rows, tuple(_rows_of(each)[0] for each in deeper), is_list, geometry)

    def with_rope(self, prompt: UInt32s, places: MediaPlaces) -> MediaPlaces:
        """The places with the prompt's positions, where the model has three to a token. Raises
        BadRequest for a prompt in which images do not stand apart.
        """
        if self._rope_index is None:
            return places
        items: tuple[Any, ...] = places.features
        try:
            rope, delta = self._rope(prompt, [each.geometry for each in items])
        except Exception as error:  # transformers says it in many ways
            given = Summary("placeholders of images that adjoin, or of one that is divided")
            allowed = (
                "each image's in one run between other tokens, as the chat template writes them"
            )
            raise BadRequest("media", given, allowed) from error
        return replace(places, rope=rope[:, : places.end].copy(), rope_delta=delta)

    def _rope(self, prompt: UInt32s, images: Sequence[Arrays]) -> tuple[Int32s, int]:
        assert self._rope_index is not None
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        taken = _parameters(self._rope_index)
        given: dict[str, torch.Tensor] = {"input_ids": ids}
        if "mm_token_type_ids" in taken:
            given["mm_token_type_ids"] = (ids == self.placeholder_id).long()
        for name in {name for each in images for name in each} & taken:
            given[name] = torch.cat([torch.from_numpy(each[name].copy()) for each in images])
        positions, deltas = self._rope_index(**given)
        if len(positions) != 3:
            raise ValueError(f"{len(positions)} positions to a token, not 3")
        return positions[:, 0].numpy().astype(np.int32), int(deltas.flatten()[0])

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor,
        context: Any,
        plan: MediaPlan,
        where: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [kept, vocab] of a step's tokens [T]. where: [N] the plan's placeholders among
        them. positions: [T], which the plan's count instead of, if it has some.
        """
        position_ids = positions[None]
        if plan.rope is not None:
            position_ids = torch.from_numpy(plan.rope)[:, None]
        merged = {_MERGED: {"image": _joined(plan)}} if len(plan.tokens) else {}
        with _Masked(self._base, self.placeholder_id, len(ids), where):
            logits: torch.Tensor = self.module(
                input_ids=ids[None],
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=keep,
                paged=context,
                **merged,
            ).logits[0]
        return logits


class _Masked:
    """While it is entered, a model's placeholders are the tokens `where`, whatever the ids say."""

    def __init__(
        self, base: Any, placeholder_id: int, num_tokens: int, where: torch.Tensor
    ) -> None:
        self._base = base
        self._own = getattr(type(base), _MASK, None)
        self._ids = torch.full((1, num_tokens), -1, dtype=torch.int64)
        self._ids[0, where] = placeholder_id

    def __enter__(self) -> None:
        own, base, ids = self._own, self._base, self._ids
        if own is None:
            raise ValueError(f"the model has no {_MASK}, by which images find their places")

        def mask(input_ids: object = None, *others: Any, **named: Any) -> Any:
            return own(base, ids, *others, **named)

        base.__dict__[_MASK] = mask

    def __exit__(self, *_: object) -> None:
        self._base.__dict__.pop(_MASK, None)


def _joined(plan: MediaPlan) -> Any:
    """The rows of a plan, as the model's own towers would give them."""
    items: tuple[Any, ...] = plan.features
    cuts = list(zip(items, plan.starts.tolist(), plan.counts.tolist(), strict=True))
    rows = torch.cat([each.rows[start : start + num] for each, start, num in cuts])
    made = _output(pooler_output=[rows] if items[0].is_list else rows[None])
    if items[0].deeper:
        layers = range(len(items[0].deeper))
        made["deepstack_features"] = [
            [torch.cat([each.deeper[layer][start : start + num] for each, start, num in cuts])]
            for layer in layers
        ]
    return made


def _rows_of(given: Any) -> tuple[torch.Tensor, bool]:
    """Features [..., width], or a list of them, as [N, width]; and whether it was a list."""
    is_list = isinstance(given, list | tuple)
    parts = list(given) if is_list else [given]
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in parts]), is_list


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)
