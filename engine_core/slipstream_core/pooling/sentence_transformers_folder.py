"""Reads how a folder of sentence-transformers makes a vector of a text: modules.json, the folders
of the modules that it names, and the prompts of config_sentence_transformers.json.

Without modules.json a model is pooled as vLLM does: encoders by their first token, decoders by
their last one, and the vector is normalised.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream_core.model.hub import Source, find_file, read_json

MODULES = "modules.json"

Pooling = Literal["cls", "mean", "lasttoken"]

_POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "lasttoken")
# the keys of 1_Pooling/config.json that are true
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MAX_PROMPTS = 256
_MAX_PROMPT_CHARS = 2**16


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer behind the pooling. path: its folder. activation: a class of torch.nn."""

    path: str
    activation: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """The way from tokens' hidden states to a vector. prompts: texts that may stand in front of an
    input, by their names. default_prompt: the name of the one that stands there unless another is
    named; empty: none. max_len: tokens of an input; None: the model's own limit.
    """

    pooling: Pooling
    dense: tuple[DenseLayer, ...] = ()
    normalizes: bool = True
    prompts: Mapping[str, str] | None = None
    default_prompt: str = ""
    max_len: int | None = None


def is_sentence_transformer(source: Source) -> bool:
    """True if the model comes with modules of sentence-transformers."""
    return find_file(source, MODULES) is not None


def read_recipe(source: Source, *, is_causal: bool) -> Recipe:
    """The recipe of a model. is_causal: whether it is a decoder. Raises ValueError for one that is
    not served.
    """
    listed = find_file(source, MODULES)
    if listed is None:
        return Recipe("lasttoken" if is_causal else "cls")
    kinds = [(_kind(each), str(each.get("path", ""))) for each in _listed(listed.read_bytes())]
    if [kind for kind, _ in kinds[:2]] != ["Transformer", "Pooling"]:
        raise ValueError(f"{MODULES} does not begin with Transformer and Pooling")
    if kinds[0][1]:
        raise ValueError(f"{MODULES} has its Transformer in a folder of its own, {kinds[0][1]!r}")
    pooling = _object(source, f"{kinds[1][1]}/config.json")
    dense: list[DenseLayer] = []
    normalizes = False
    for kind, path in kinds[2:]:
        if kind == "Normalize":
            normalizes = True
        elif kind == "Dense" and not normalizes:
            dense.append(DenseLayer(path, _activation(source, path)))
        else:
            raise ValueError(
                f"{MODULES} has the module {kind}, allowed behind the pooling: Dense and Normalize"
            )
    prompts, default = _prompts(source)
    if any(prompts.values()) and pooling.get("include_prompt") is False:
        raise ValueError("its prompts are not to be pooled (include_prompt), which is not done")
    return Recipe(_pooling(pooling), tuple(dense), normalizes, prompts, default, _max_len(source))


def _listed(content: bytes) -> list[dict[str, Any]]:
    modules = json.loads(content)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ValueError(f"{MODULES} is not a list of modules")
    return modules


def _kind(module: Mapping[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _object(source: Source, name: str) -> dict[str, Any]:
    found = read_json(source, name)
    if not isinstance(found, dict):
        raise ValueError(f"{name} is missing, or no object")
    return found


def _pooling(config: Mapping[str, Any]) -> Pooling:
    """Raises ValueError for a pooling that is not computed."""
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(_modes(config))
    for pooling in _POOLINGS:
        if modes == [pooling]:
            return pooling
    raise ValueError(f"its pooling is {', '.join(modes) or 'none'}, allowed: {_POOLINGS}")


def _modes(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if name.startswith("pooling_mode_") and value is True:
            yield _MODES.get(name, name)


def _activation(source: Source, path: str) -> str:
    name = str(_object(source, f"{path}/config.json").get("activation_function", ""))
    return name.rpartition(".")[2] or "Identity"


def _prompts(source: Source) -> tuple[dict[str, str], str]:
    config = read_json(source, "config_sentence_transformers.json") or {}
    prompts = config.get("prompts") or {}
    if (
        not isinstance(prompts, dict)
        or len(prompts) > _MAX_PROMPTS
        or not all(isinstance(each, str) for each in prompts.values())
        or sum(map(len, prompts.values())) > _MAX_PROMPT_CHARS
    ):
        raise ValueError("config_sentence_transformers.json has prompts that are no short texts")
    default = config.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise ValueError(f"config_sentence_transformers.json has no prompt {default!r}")
    return prompts, default


def _max_len(source: Source) -> int | None:
    config = read_json(source, "sentence_bert_config.json") or {}
    if config.get("do_lower_case"):
        raise ValueError("sentence_bert_config.json has do_lower_case, which is not done")
    given = config.get("max_seq_length")
    return given if isinstance(given, int) and given > 0 else None
