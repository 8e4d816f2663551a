"""Indexers, which select the tokens that a layer attends to (DeepSeek V3.2, GLM-5).

One selects `index_topk` tokens, so it selects all of them in a row that is no longer. Models are
served within that, and their indexers do not run: what they compute is of no effect.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, NoReturn

from torch import nn


class EveryToken:
    """Stands for a mask, and for what is selected of it: all that attention sees."""

    def __getitem__(self, part: object) -> EveryToken:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"it computes with what an indexer selects ({name})")


EVERY_TOKEN = EveryToken()


def skip_indexers(model: nn.Module, layers: Collection[int]) -> None:
    """Have the attention of these layers select every token; others stay as they are."""
    module: Any
    for module in model.modules():
        if not hasattr(module, "indexer") or getattr(module, "layer_idx", None) not in layers:
            continue
        if module.indexer is not None:  # else the layer selects what the one before it does
            module.indexer.forward = _select_every
        module.forward = partial(_attend_to_every, module.forward)


def _select_every(*_: object, **__: object) -> EveryToken:
    return EVERY_TOKEN


def _attend_to_every(attend: Any, *given: object, **named: object) -> Any:
    return attend(*given, **(named | {"attention_mask": EVERY_TOKEN}))
