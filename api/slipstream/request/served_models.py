"""The served model that a request is for."""

from __future__ import annotations

import os
from collections.abc import Sequence

from msgspec import Struct, structs

from slipstream.errors import bad_request
from slipstream_ipc.errors import BadRequest, one_of
from slipstream_ipc.messages import AdapterRef, ModelCard


class LoRARequest(Struct, frozen=True):
    """An adapter by its name, for the calls of `LLM` and clients; of a server that serves it.

    Fields are vLLM's. lora_int_id: without meaning here. lora_path: its folder; if it is given, it
    has to be the one that the server serves under the name.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


class AdaptedModel(ModelCard, array_like=True, frozen=True):
    """An adapter of a served model, as a model of its own: the base's card under its name."""

    adapter: AdapterRef = AdapterRef("", "", b"")
    base: str = ""  # the name of the model that it changes


def adapted(model: ModelCard, adapter: AdapterRef) -> AdaptedModel:
    """The model that an adapter makes of `model`."""
    given = structs.asdict(model) | {"name": adapter.name, "aliases": (), "adapters": ()}
    return AdaptedModel(**given, adapter=adapter, base=model.name)


def base_of(model: ModelCard) -> str:
    """The name of the model whose weights serve this one: its own, but for an adapter's."""
    return model.base if isinstance(model, AdaptedModel) else model.name


def find_model(models: Sequence[ModelCard], name: str | None) -> ModelCard | None:
    """The model of this name, or the only one where no name is given; None if there is none.

    A model's own name comes before an adapter's, then come another's aliases, and beginnings of
    names. An adapter is an `AdaptedModel`.
    """
    if name is None:
        return models[0] if len(models) == 1 else None
    for fits in (_is_named, _has_adapter, _has_alias, _has_beginning):
        for model in models:
            if fits(model, name):
                adapter = _adapter(model, name) if fits is _has_adapter else None
                return model if adapter is None else adapted(model, adapter)
    return None


def listed_names(model: ModelCard) -> tuple[str, ...]:
    """The names by which a model is listed: all but beginnings of names, and its adapters'."""
    aliases = [alias for alias in model.aliases if not alias.endswith("*")]
    return (model.name, *aliases, *[each.name for each in model.adapters])


def checked_model(models: Sequence[ModelCard], name: str | None) -> ModelCard:
    """`find_model`. Raises: BadRequestError, which lists the models."""
    found = find_model(models, name)
    if found is None:
        raise bad_request(BadRequest("model", name, names_of(models)))
    return found


def with_adapter(
    models: Sequence[ModelCard], name: str | None, wanted: LoRARequest
) -> AdaptedModel:
    """The adapter that `wanted` names. name: of its base, or the adapter's own, if one is given.

    Raises: BadRequestError.
    """
    named = None if name is None else find_model(models, name)
    if isinstance(named, AdaptedModel) and named.name != wanted.lora_name:
        allowed = f"none but {named.name!r}, which the call names as its model"
        raise bad_request(BadRequest("lora_request", wanted.lora_name, allowed))
    bases = [model for model in models if name is None or find_model([model], name) is not None]
    found = next((it for each in bases if (it := _adapter(each, wanted.lora_name))), None)
    if found is None:
        names = [each.name for model in bases for each in model.adapters]
        allowed = one_of(names) if names else "none: no adapter is served"
        raise bad_request(BadRequest("lora_request", wanted.lora_name, allowed))
    if wanted.lora_path and os.path.abspath(os.path.expanduser(wanted.lora_path)) != found.path:
        allowed = f"{found.path}, which is served as {found.name!r}"
        raise bad_request(BadRequest("lora_request", wanted.lora_path, allowed))
    return adapted(next(each for each in bases if found in each.adapters), found)


def names_of(models: Sequence[ModelCard]) -> str:
    """The models' names, for messages."""
    found = [
        name
        for model in models
        for name in (model.name, *model.aliases, *[each.name for each in model.adapters])
    ]
    return one_of(found) if len(found) > 1 else "".join(map(repr, found))


def _is_named(model: ModelCard, name: str) -> bool:
    return model.name == name


def _adapter(model: ModelCard, name: str) -> AdapterRef | None:
    return next((each for each in model.adapters if each.name == name), None)


def _has_adapter(model: ModelCard, name: str) -> bool:
    return _adapter(model, name) is not None


def _has_alias(model: ModelCard, name: str) -> bool:
    return name in model.aliases


def _has_beginning(model: ModelCard, name: str) -> bool:
    return any(each.endswith("*") and name.startswith(each[:-1]) for each in model.aliases)
