"""Renames the tensors of checkpoints that were saved from another class of the same model.

A language model that was cut out of a multimodal one may keep the whole model's names
(`model.language_model.layers…` under a class whose layers are `model.layers…`), and a fine-tune of
the whole one may have lost them. Transformers would leave such weights at random values.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from slipstream_core.model.leftover_tensors import is_beside_text


def renames(names: Collection[str], shell: PreTrainedModel) -> dict[str, str]:
    """Patterns of tensors' names in a checkpoint and what replaces them, for `from_pretrained`'s
    `key_mapping`; empty where the language part has its own names, as transformers reads them.

    names: of the checkpoint's tensors. shell: the model, possibly without values.
    """
    module: Any = shell
    # by trial: `architectures` does not say what tensors are called (decision 028)
    decoder = module.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        return {}  # found by its attribute's name alone
    path = _name_of(module, decoder)
    embedding = f"{_name_of(decoder, decoder.get_input_embeddings())}.weight"
    if not path or f"{path}.{embedding}" in _as_read(names, shell):
        return {}
    found = {
        each.removesuffix(f".{embedding}")
        for each in names
        if each.endswith(f".{embedding}") and not is_beside_text(each)
    }
    if len(found) != 1:
        return {}
    theirs_at = found.pop()
    if theirs_at.endswith(f".{path}"):  # all of the model is a part of the checkpoint's
        return {rf"^{re.escape(theirs_at.removesuffix(path))}": ""}
    children = "|".join(re.escape(name) for name, _ in decoder.named_children())
    mapping = {rf"^{re.escape(theirs_at)}\.({children})\.": rf"{path}.\1."}
    head = module.get_output_embeddings()
    own = "" if head is None else f"{_name_of(module, head)}.weight"
    theirs = [each for each in names if own and each.endswith(f".{own}")]
    if own and own not in names and len(theirs) == 1:
        mapping[f"^{re.escape(theirs[0])}$"] = own
    return mapping


def _as_read(names: Collection[str], shell: PreTrainedModel) -> set[str]:
    """The names after transformers' own renaming."""
    conversions = get_model_conversion_mapping(shell)
    found = set()
    for name in names:
        renamed = name
        for each in conversions:
            renamed, _ = each.rename_source_key(renamed)
        found.add(renamed)
    return found


def _name_of(module: nn.Module, part: nn.Module) -> str:
    names: list[str] = [name for name, each in module.named_modules() if each is part]
    return names[0]
