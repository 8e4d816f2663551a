"""Which of the served models a request is for."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import bad_request
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import ModelCard


def find_model(models: Sequence[ModelCard], name: str | None) -> ModelCard | None:
    """The model of this name, or the only one where no name is given; None if there is none."""
    if name is None:
        return models[0] if len(models) == 1 else None
    return next((model for model in models if model.name == name), None)


def checked_model(models: Sequence[ModelCard], name: str | None) -> ModelCard:
    """`find_model`. Raises: BadRequestError, which lists the models."""
    found = find_model(models, name)
    if found is None:
        raise bad_request(BadRequest("model", name, names_of(models)))
    return found


def names_of(models: Sequence[ModelCard]) -> str:
    """The models' names, for messages."""
    names = ", ".join([repr(model.name) for model in models])
    return f"one of {names}" if len(models) > 1 else names
