"""Serves the language model of a multimodal checkpoint, as text.

A multimodal configuration gets its own class of transformers, whose language part alone attends
through our function. What is beside that part and does not run for text (towers for images and
sound, projectors) is found by a trial forward, not by name, and removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from slipstream_core.attention.interface import ATTENTION_NAME

_TEXT = "text_config"
_DEPTHS = "depth", "num_hidden_layers"  # names of a tower's number of layers

# missing from transformers' annotations
_of_text: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
_of_several: Any = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
_text_class: Any = AutoModelForCausalLM
_several_class: Any = transformers.AutoModelForMultimodalLM


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that builds a model which answers with text."""
    if type(config) in _of_text or type(config) not in _of_several:
        return _text_class
    return _several_class


def has_class(config: PreTrainedConfig) -> bool:
    """True if transformers has a class for a model with this configuration, or if the model's own
    folder may have one.
    """
    has_own_code = bool(getattr(config, "auto_map", None))
    return type(config) in _of_text or type(config) in _of_several or has_own_code


def writing_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a configuration that writes text, where the whole is of several models and has no
    forward (Qwen's Omni, which speak); else the configuration itself.
    """
    is_several = type(config) in _of_several
    if not is_several or _of_several[type(config)].forward is not torch.nn.Module.forward:
        return config
    for name in config.sub_configs:
        part: PreTrainedConfig | None = getattr(config, name)
        if type(part) in _of_several and part is not None:
            for each in ("dtype", "quantization_config"):
                if hasattr(config, each):
                    setattr(part, each, getattr(config, each))
            return part
    return config


def with_towers(text: PreTrainedConfig) -> PreTrainedConfig:
    """The multimodal configuration around that of a language part which has no class of its own,
    with towers of one layer, as they are removed; the same configuration where there is none.
    """
    for whole in _of_several:
        if whole.sub_configs.get(_TEXT) is not type(text):
            continue
        config: PreTrainedConfig = whole(text_config=text.to_dict())
        for name in config.sub_configs:
            part = getattr(config, name)
            for depth in _DEPTHS if name != _TEXT else ():
                if isinstance(getattr(part, depth, None), int):
                    setattr(part, depth, 1)
        for name in ("dtype", "tie_word_embeddings", "architectures"):
            setattr(config, name, getattr(text, name, None))
        return config
    return text


def attention_of(config: PreTrainedConfig) -> str | dict[str, str]:
    """Attention through our function, in the language part alone."""
    others = [name for name in config.sub_configs if name != _TEXT]
    if not others or _TEXT not in config.sub_configs:
        return ATTENTION_NAME
    return {"": ATTENTION_NAME, _TEXT: ATTENTION_NAME} | dict.fromkeys(others, "eager")


def keep_asked(module: Any) -> None:
    """Have the head of a model whose own forward does not know `logits_to_keep` compute the logits
    of these tokens alone. Raises ValueError for a model without a head of its own.
    """
    head = module.get_output_embeddings()
    if head is None:
        raise ValueError("it computes logits of all tokens, in an unknown way")
    asked: list[torch.Tensor | None] = []  # of the forward that runs

    def note(_: object, args: Any, kwargs: dict[str, Any]) -> None:
        asked[:] = [kwargs.get("logits_to_keep")]

    def keep(_: object, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        kept = asked.pop()
        return inputs[0] if kept is None else inputs[0].index_select(1, kept)

    module.register_forward_pre_hook(note, with_kwargs=True)
    head.register_forward_pre_hook(keep)


class TowerFinder:
    """Finds what does not run while it is entered: the modules beside the language part."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module: Any = module
        self._ran: set[torch.nn.Module] = set()
        self._hooks: list[Any] = []

    def __enter__(self) -> TowerFinder:
        for each in self._module.modules():
            self._hooks.append(each.register_forward_pre_hook(self._note))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, module: torch.nn.Module, _inputs: object) -> None:
        self._ran.add(module)

    def towers(self) -> tuple[str, ...]:
        """Their names, as in `named_modules`. Parts of the language part are none: which of its
        experts run depends on the values.
        """
        found: list[str] = []
        self._search(self._module, "", found)
        return tuple(found)

    def _search(self, module: torch.nn.Module, name: str, found: list[str]) -> None:
        decoder = self._module.get_decoder()
        if module is decoder:
            return
        parents = {each for each in self._module.modules() if decoder in set(each.modules())}
        for part, child in module.named_children():
            path = f"{name}.{part}" if name else part
            if child in parents:
                self._search(child, path, found)
            elif not self._ran.intersection(child.modules()):
                found.append(path)


def remove_towers(module: torch.nn.Module, towers: Iterable[str]) -> None:
    """Remove modules by name; those that are not there are passed over."""
    for name in towers:
        parent, _, part = name.rpartition(".")
        try:
            module.get_submodule(parent)._modules[part] = None
        except AttributeError:
            continue


def is_within(tensor: str, towers: Iterable[str]) -> bool:
    """True if a tensor belongs to one of the towers."""
    return any(tensor.startswith(f"{each}.") for each in towers)
