"""POST /abort: end a request, whichever front or client submitted it.

- A request is named by the `id` of its answer, which is as hard to guess as its stream ids. With
  API keys it is known only to the key with which it was made.
- The result is `aborted` if any stream was still running, `ended` if all had ended, and 404 if none
  is known any more. The reader gets the output so far, with the finish reason `abort`; a request
  whose prompt is not tokenized yet is refused instead.
"""

from __future__ import annotations

from slipstream.client.connection.loop_io import LoopIO
from slipstream.errors import UnknownStreamError
from slipstream.http.answers.event_ids import parse_answer_id
from slipstream.http.api_errors import bad_field
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.openai.body_decoder import BodyDecoder
from slipstream.http.openai.request_bodies import AbortRequest
from slipstream.http.openai.response_bodies import Aborted
from slipstream.http.planning.served_model import respond_when_done, served_models
from slipstream.http.response_encoding import Response, json_response
from slipstream_ipc.messages import MAX_CANCELLED, Cancel, Cancelled, Fault

_decoder = BodyDecoder(AbortRequest)


def abort(io: LoopIO, request: HttpRequest, exchange: Exchange, scope: bytes) -> None:
    """Abort the request and answer the exchange, later. scope: of its streams. Raises: ApiError."""
    name = _decoder.decode(request.body).request_id
    answer = parse_answer_id(name, "request_id")
    if answer.num_streams > MAX_CANCELLED:
        what = f"request_id: got {answer.num_streams} choices, allowed: at most {MAX_CANCELLED}"
        raise bad_field("request_id", what)
    served_models(io)

    def response_of(found: Cancelled) -> Response:
        if "running" in found.found:
            return json_response(200, Aborted(name, "aborted"))
        if "ended" in found.found:
            return json_response(200, Aborted(name, "ended"))
        why = (
            f"request_id: unknown request {name}: it never existed, or ended and is no longer kept"
        )
        raise UnknownStreamError(Fault("unknown_stream", why))

    ids = tuple([bytes.fromhex(stream_id) for stream_id in answer.stream_ids()])
    respond_when_done(io.ask(Cancel(0, ids, scope)), exchange, response_of, {})
