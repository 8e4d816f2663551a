"""Code shared by endpoints: the served models, and answering with the result of a query."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from msgspec.structs import replace

from slipstream.client.connection.loop_io import LoopIO
from slipstream.errors import SlipstreamError
from slipstream.http.api_errors import (
    ApiError,
    bad_field,
    error_of,
    not_ready,
    unknown_model,
)
from slipstream.http.changed_turns import tell_changed_turns
from slipstream.http.exchange import Exchange
from slipstream.http.response_encoding import Response
from slipstream.request.served_models import find_model, names_of
from slipstream_ipc.messages import Detokenize, Detokenized, ModelCard, Tokenize, Tokenized
from slipstream_ipc.telemetry.logs import of_requests

_logger = logging.getLogger(__name__)


def served_models(io: LoopIO) -> tuple[ModelCard, ...]:
    """The served models, one or more. Raises ApiError (503) while there is none."""
    if not io.models:
        raise not_ready("the engine is still starting, or does not answer this front yet")
    return io.models


def served_model(io: LoopIO, name: str | None) -> ModelCard:
    """The model of a request. name: in the request, if any.

    Raises ApiError while there is no model (503); if the name is none of the served ones' (404, or
    503 while a replica loads that may serve it); if there is none, and several are served (400).
    """
    models = served_models(io)
    model = find_model(models, name)
    if model is not None:
        return model
    if name is None:
        raise bad_field("model", f"model: missing, allowed: {names_of(models)}")
    if io.cluster.is_starting:
        raise not_ready(f"model: {name!r} is not served yet; a replica is loading its model")
    raise unknown_model(name, names_of(models))


def tokenizer_of(io: LoopIO, given: str | None, model: str) -> str:
    """The tokenizer of a served model, by its name: the one given, unless several are served, or
    the one that the server names. Raises: LookupError.
    """
    card = find_model(io.models, model)
    if given and len(io.models) <= 1:
        return given
    if card is None:
        raise LookupError(f"the model {model!r} is not served any more")
    return card.path


def guarded(exchange: Exchange, call: Callable[[], None]) -> None:
    """Call something that answers the exchange; an exception becomes the answer."""
    try:
        call()
    except (ApiError, SlipstreamError) as error:
        exchange.refuse(error_of(error, {}))
    except Exception as error:
        request = exchange.request
        what = request.method, request.path
        _logger.exception("%s %s failed", *what, extra=of_requests(request.id))
        exchange.refuse(error_of(error, {}))


def ask(
    io: LoopIO, query: Tokenize | Detokenize, model: str, exchange: Exchange
) -> Future[Tokenized | Detokenized]:
    """The future answer to a query of an exchange's, which waits among those of its key."""
    return io.ask(replace(query, tenant=exchange.request.tenant or b""), model)


def respond_when_done(
    future: Future[Any],
    exchange: Exchange,
    response_of: Callable[[Any], Response],
    param_names: dict[str, str],
) -> None:
    """Answer the exchange with the result of a query; a disconnect cancels the query.

    response_of: may raise ApiError. param_names: see `error_of`.
    """

    def done(answered: Future[Any]) -> None:
        if answered.cancelled():
            return
        try:
            found = answered.result()
            response = response_of(found)
            if isinstance(found, Tokenized):
                tell_changed_turns(exchange.request, [found.changed_turns])
        except (ApiError, SlipstreamError) as error:
            exchange.refuse(error_of(error, param_names))
        except Exception as error:
            request = exchange.request
            _logger.exception("%s failed", request.path, extra=of_requests(request.id))
            exchange.refuse(error_of(error, {}))
        else:
            exchange.respond(response)

    def disconnect() -> None:
        future.cancel()

    exchange.on_disconnect = disconnect
    future.add_done_callback(done)
