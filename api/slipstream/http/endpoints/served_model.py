"""What endpoints share: the served model, and answering with the result of a query."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from slipstream.client.connection.loop_io import LoopIO
from slipstream.errors import SlipstreamError
from slipstream.http.api_errors import ApiError, error_of, not_ready, unknown_model
from slipstream.http.exchange import Exchange
from slipstream.http.response_encoding import Response
from slipstream_ipc.messages import ModelCard
from slipstream_ipc.telemetry.logs import of_requests

_logger = logging.getLogger(__name__)


def served_model(io: LoopIO, name: str | None = None) -> ModelCard:
    """The served model. name: in the request, if any.

    Raises ApiError while there is no model (503), or if the name is another's (404).
    """
    model = io.model
    if model is None:
        raise not_ready("the engine is still starting, or does not answer this front yet")
    if name is not None and name != model.name:
        raise unknown_model(name, model.name)
    return model


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
            response = response_of(answered.result())
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
