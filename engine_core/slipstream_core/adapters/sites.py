"""The linear layers of a model that an adapter may change."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class Site(NamedTuple):
    """A linear layer whose products are known."""

    number: int  # among the model's
    num_outputs: int
    num_inputs: int


def names_of_layers(module: nn.Module) -> dict[int, str]:
    """The name of each linear layer, by the id of its weight. A weight that several of them share
    has none, as its products do not say whose they are.
    """
    names: dict[int, list[str]] = {}
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear):
            names.setdefault(id(each.weight), []).append(name)
    return {weight: of_it[0] for weight, of_it in names.items() if len(of_it) == 1}


def why_no_site(module: nn.Module, name: str) -> str:
    """The reason why a module is no site, to follow its name."""
    try:
        found = module.get_submodule(name)
    except AttributeError:
        return "this model has no such layer"
    if not isinstance(found, nn.Linear):
        return f"it is {type(found).__name__}, allowed: linear layers"
    return "this model does not use it as a product of its own, so it cannot be changed"
