"""The served model that a request is for."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import bad_request
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import ModelCard


def find_model(models: Sequence[ModelCard], name: str | None) -> ModelCard | None:
    """The model of this name, or the only one where no name is given; None if there is none.

    A model's own name comes before another's aliases, and these before beginnings of names.
    """
    if name is None:
        return models[0] if len(models) == 1 else None
    for fits in (_is_named, _has_alias, _has_beginning):
        for model in models:
            if fits(model, name):
                return model
    return None


def listed_names(model: ModelCard) -> tuple[str, ...]:
    """The names by which a model is listed: all but beginnings of names."""
    return (model.name, *[alias for alias in model.aliases if not alias.endswith("*")])


def checked_model(models: Sequence[ModelCard], name: str | None) -> ModelCard:
    """`find_model`. Raises: BadRequestError, which lists the models."""
    found = find_model(models, name)
    if found is None:
        raise bad_request(BadRequest("model", name, names_of(models)))
    return found


def names_of(models: Sequence[ModelCard]) -> str:
    """The models' names, for messages."""
    found = [repr(name) for model in models for name in (model.name, *model.aliases)]
    return f"one of {', '.join(found)}" if len(found) > 1 else "".join(found)


def _is_named(model: ModelCard, name: str) -> bool:
    return model.name == name


def _has_alias(model: ModelCard, name: str) -> bool:
    return name in model.aliases


def _has_beginning(model: ModelCard, name: str) -> bool:
    return any(each.endswith("*") and name.startswith(each[:-1]) for each in model.aliases)
