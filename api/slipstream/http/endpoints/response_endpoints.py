"""/v1/responses and the paths below it: new responses, and those that are kept.

- A response that runs is read by attaching to its stream, from its beginning; the reader before is
  told that it is superseded. One that has ended is printed from what the worker has kept.
- A response that is not kept, and another key's, are the same 404.
- What is recalled is held by shares of the front's budget (`shares`): a request that waits for one
  holds its body as it was sent.
- A response in the background does not depend on a reader: it runs to its end without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote

import msgspec

from slipstream.client.connection.loop_io import LoopIO
from slipstream.client.connection.queries import ids_of, new_recall
from slipstream.client.streams.stream_state import StreamState
from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.answers.background import start_in_background
from slipstream.http.answers.event_ids import AnswerId, StreamCursor, parse_event_id
from slipstream.http.answers.live_answer import AnswerContext
from slipstream.http.api_errors import ApiError, bad_field
from slipstream.http.auth import ApiKeys
from slipstream.http.blocks.block_printer import NOTHING, BlockShape, BlockWriter
from slipstream.http.endpoints.resume import last_event_id, plan_or_resume
from slipstream.http.exchange import Exchange, Handler, HttpRequest
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.planning.chat import prompt_query
from slipstream.http.planning.served_model import (
    ask,
    guarded,
    respond_when_done,
    served_model,
    served_models,
)
from slipstream.http.response_encoding import Response, json_response
from slipstream.http.responses.response_object import (
    DeletedResponse,
    InputItemList,
    InputTokenCount,
)
from slipstream.http.responses.response_plan import (
    KIND,
    MAX_RECALLED_BYTES,
    Named,
    context_of,
    echo_of,
    new_response,
    stream_id_of,
    unknown_response,
)
from slipstream.http.responses.response_printer import (
    ID_PREFIX,
    ResponsePrinter,
    response_shape,
)
from slipstream.http.responses.response_record import KeptResponse, shown_item
from slipstream.http.responses.responses_request import (
    ResponsesRequest,
    chat_of,
    read_response_request,
)
from slipstream.http.shares import Share
from slipstream.request.requests import new_resume
from slipstream.request.served_models import base_of, find_model
from slipstream_ipc.messages import Cancel, End, KeptAnswer, Recalled, Tokenized
from slipstream_ipc.validation.kept_size import max_text_bytes

PATH = "/v1/responses"
PREFIX = "/v1/responses/"
COUNT_PATH = "/v1/responses/input_tokens"
_CANCEL, _INPUT_ITEMS = "cancel", "input_items"
QUERY = ("stream", "starting_after", "include", "include[]", "include_obfuscation")
LIST_QUERY = ("after", "limit", "order", "include", "include[]")
_MAX_LISTED = 100
_LISTED = 20
_MAX_DIGITS = 10

Starter = Callable[[AnswerPlan, Exchange, AnswerContext], None]
Found = Callable[[str, KeptResponse], None]  # a stream, and what is kept of it
Then = Callable[[], None]


class ReadBody(Protocol):
    """Reads the body of a request to one of OpenAI's endpoints. Raises: ApiError."""

    def __call__(
        self,
        read: Callable[[bytes, IgnoredFields | None], ResponsesRequest],
        request: HttpRequest,
        /,
    ) -> ResponsesRequest: ...


class StartAnswer(Protocol):
    """Runs the streams of a plan. starter: in place of `start_answer`."""

    def __call__(
        self,
        plan: AnswerPlan,
        request: HttpRequest,
        exchange: Exchange,
        starter: Starter = ...,
        /,
    ) -> None: ...


class ResponseEndpoints:
    """The endpoints of responses. by_prefix: handlers by method, of all paths below `PREFIX`."""

    def __init__(
        self,
        io: LoopIO,
        keys: ApiKeys,
        read: ReadBody,
        start: StartAnswer,
        context: AnswerContext,
    ) -> None:
        self._shares = context.shares
        self._slices = context.slices
        self._io = io
        self._keys = keys
        self._read = read
        self._start = start
        self.by_prefix: dict[str, Handler] = {
            "GET": self.retrieve,
            "DELETE": self.delete,
            "POST": self.cancel,
        }

    def create(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /v1/responses. Raises: ApiError, BadRequestError."""
        self._with_named(request, exchange, self._create)

    def count(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /v1/responses/input_tokens. Raises: ApiError, BadRequestError."""
        self._with_named(request, exchange, self._count)

    def retrieve(self, request: HttpRequest, exchange: Exchange) -> None:
        """GET /v1/responses/ID and …/input_items. Raises: ApiError."""
        response_id, rest = _parts(request)
        if rest == _INPUT_ITEMS:
            query = _query(request.query, LIST_QUERY)
            show = partial(_list_items, query=query, exchange=exchange)
        elif rest:
            raise _no_such_path(request)
        else:
            query = _query(request.query, QUERY)
            if query.get("stream", "false") not in ("true", "false"):
                raise bad_field("stream", "stream: allowed: true, false")
            show = partial(_show, exchange=exchange)
            if query.get("stream") == "true":
                if request.method == "HEAD":  # it would take the stream over from its reader
                    raise ApiError(405, "method: got HEAD, allowed: GET")
                cursor = _cursor(request, response_id, query)
                show = partial(self._stream, cursor=cursor, request=request, exchange=exchange)
        self._with_kept(response_id, request, exchange, show)

    def delete(self, request: HttpRequest, exchange: Exchange) -> None:
        """DELETE /v1/responses/ID. Raises: ApiError."""
        response_id, rest = _parts(request)
        if rest:
            raise _no_such_path(request)

        def deleted() -> None:
            exchange.respond(json_response(200, DeletedResponse(response_id)))

        def found(_: KeptResponse) -> None:
            stream_id = stream_id_of(response_id)
            assert stream_id is not None
            self._recall((stream_id,), request, exchange, _ignore, deleted, forget=True)

        # looked for first: a worker that dies behind its deletion leaves another to find nothing
        self._with_kept(response_id, request, exchange, found)

    def cancel(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /v1/responses/ID/cancel. Raises: ApiError."""
        response_id, rest = _parts(request)
        if rest != _CANCEL:
            raise _no_such_path(request)
        show = partial(_show, exchange=exchange)

        def cancelled(future: Future[Any]) -> None:
            if not future.cancelled():
                error = future.exception()
                again = partial(self._with_kept, response_id, request, exchange, show)
                guarded(exchange, again if error is None else partial(_fail, error))

        def found(kept: KeptResponse) -> None:
            if kept.is_over:
                show(kept)
                return
            stream_id = stream_id_of(response_id)
            assert stream_id is not None
            future = self._io.ask(Cancel(0, (bytes.fromhex(stream_id),), self._scope(request)))
            future.add_done_callback(cancelled)

        self._with_kept(response_id, request, exchange, found)

    def resume(self, plan: AnswerPlan, request: HttpRequest, exchange: Exchange) -> None:
        """GET /v1/streams/ID of a response, whose events repeat its request if it is kept."""
        stream_id = plan.id.first.hex()

        resumed = plan

        def found(_: str, known: KeptResponse) -> None:
            nonlocal resumed
            resumed = replace(
                plan,
                shape=self._shape(known),
                created=known.begun.created_at,
                is_background=known.is_background,
            )

        def recalled() -> None:
            self._start(resumed, request, exchange)
            exchange.give_back()

        def recall() -> None:
            self._recall((stream_id,), request, exchange, found, recalled)

        self._with_share(request, exchange, recall)

    # ---- within ------------------------------------------------------------------------------

    def _with_named(
        self,
        request: HttpRequest,
        exchange: Exchange,
        then: Callable[[ResponsesRequest, Named, HttpRequest, Exchange], None],
    ) -> None:
        """Call `then` with the body, and what it names of kept responses, as far as they are kept.

        Raises: ApiError, BadRequestError.
        """
        answer_headers = request.answer_headers
        body = self._read(read_response_request, request)
        served_model(self._io, body.model)
        named = Named(body)
        if not named.stream_ids:
            then(body, named, request, exchange)
            return
        read = [(body, named)]
        del body, named

        def recall() -> None:
            try:
                if not read:
                    request.answer_headers = answer_headers
                    again = self._read(read_response_request, request)
                    read.append((again, Named(again)))
            finally:
                request.free()
            body, named = read.pop()
            use = partial(then, body, named, request, exchange)
            self._recall(named.stream_ids, request, exchange, named.add, use)

        request.keeps_body = True
        if not self._with_share(request, exchange, recall):
            read.clear()  # it takes more than what was sent, and is read again

    def _count(
        self, body: ResponsesRequest, named: Named, _request: HttpRequest, exchange: Exchange
    ) -> None:
        def response_of(found: Tokenized) -> Response:
            return json_response(200, InputTokenCount(len(ids_of(found))))

        model = served_model(self._io, body.model)
        query, places = prompt_query(chat_of(body, context_of(body, named)), model)
        asked = ask(self._io, query, base_of(model), exchange)
        respond_when_done(asked, exchange, response_of, {**places, "prompt": "input"})
        exchange.give_back()

    def _create(
        self, body: ResponsesRequest, named: Named, request: HttpRequest, exchange: Exchange
    ) -> None:
        model = served_model(self._io, body.model)
        event_id = last_event_id(request)
        before = None if event_id is None else parse_event_id(event_id)
        options: Any = {"scope": self._scope(request), "named": named}
        if body.background and not body.stream:
            plan, response = new_response(body, model, **options)
            self._start(plan, request, exchange, partial(start_in_background, response))
            exchange.give_back(all_but=named.num_bytes)
            return
        new: AnswerPlan | None = None

        def new_plan() -> AnswerPlan:
            nonlocal new
            new, _ = new_response(body, model, **options, before=before)
            return new

        plan = plan_or_resume(request, KIND, model, new_plan)
        shape = response_shape(echo_of(body, model)) if new is None else new.shape
        plan = replace(plan, shape=shape, is_background=bool(body.background))
        self._start(plan, request, exchange)
        exchange.give_back(all_but=named.num_bytes)

    def _stream(
        self, kept: KeptResponse, cursor: StreamCursor, request: HttpRequest, exchange: Exchange
    ) -> None:
        """Stream a kept response, what comes after the cursor."""
        after = NOTHING if cursor.number is None else cursor.number
        if kept.end is not None:
            _print(kept, kept.end, after, exchange)
            return
        response = kept.begun
        stream_id = response.id.removeprefix(ID_PREFIX)
        last = last_event_id(request)
        model = find_model(self._io.models, response.model)
        plan = AnswerPlan(
            id=AnswerId(KIND, bytes.fromhex(stream_id)),
            model=response.model,
            base="" if model is None else base_of(model),
            created=response.created_at,
            states=[
                StreamState(
                    new_resume(stream_id, 0, 0, 0), wants_whole=False, keeps_prompt_ids=False
                )
            ],
            shape=self._shape(kept),
            is_stream=True,
            with_usage=False,
            with_usage_so_far=False,
            num_logprobs=None,
            cursors=(cursor,),
            is_resumable=last is not None,
            event_checksum=None if last is None else parse_event_id(last).request,
            is_background=kept.is_background,
        )
        self._start(plan, request, exchange)
        exchange.give_back()

    def _shape(self, kept: KeptResponse) -> BlockShape:
        response, most_text = kept.begun, None
        if not kept.is_over:
            model = served_model(self._io, response.model)
            most_text = max_text_bytes(kept.record_bytes, model.max_kept_bytes)
        return response_shape(response, most_text)

    def _with_kept(
        self,
        response_id: str,
        request: HttpRequest,
        exchange: Exchange,
        then: Callable[[KeptResponse], None],
    ) -> None:
        """Call `then` with a response that is kept, or answer 404. Raises: ApiError."""
        served_models(self._io)
        stream_id = stream_id_of(response_id)
        if stream_id is None:
            raise unknown_response(response_id)

        known: KeptResponse | None = None

        def found(_: str, kept: KeptResponse) -> None:
            nonlocal known
            known = kept

        def recalled() -> None:
            if known is None:
                raise unknown_response(response_id)
            then(known)

        def recall() -> None:
            self._recall((stream_id,), request, exchange, found, recalled)

        self._with_share(request, exchange, recall)

    def _with_share(self, request: HttpRequest, exchange: Exchange, recall: Then) -> bool:
        """Call `recall` once there is room for what it finds; return True if there is now.

        The exchange has the share until the answer has been sent, or does not need it any more.
        """
        if exchange.share is not None:  # of what the same request has recalled before
            recall()
            return True

        def ready(share: Share) -> None:
            exchange.share = share
            if exchange.is_open:
                guarded(exchange, recall)
            else:
                exchange.give_back()

        return self._shares.take(self._scope(request), MAX_RECALLED_BYTES, ready).is_taken

    def _recall(
        self,
        stream_ids: Sequence[str],
        request: HttpRequest,
        exchange: Exchange,
        found: Found,
        then: Then,
        *,
        forget: bool = False,
    ) -> None:
        """Call `found` with each of these streams that is kept, one query after the other; `then`
        behind the last.
        """
        scope = self._scope(request)
        left = list(reversed(stream_ids))

        def ask() -> None:
            future = self._io.ask(new_recall(left[-1], scope, forget=forget))
            exchange.on_disconnect = partial(_cancel, future)
            future.add_done_callback(answered)

        def answered(future: Future[Recalled]) -> None:
            if not future.cancelled():
                self._slices.add(partial(_guarded_part, exchange, partial(take, future)), scope)

        def take(future: Future[Recalled]) -> None:
            answer, stream_id = future.result().answer, left.pop()
            if answer is not None:
                kept = _kept(answer)
                if kept is not None:
                    found(stream_id, kept)
            if left:
                ask()
            elif exchange.is_open:
                exchange.on_disconnect = None
                then()

        ask()

    def _scope(self, request: HttpRequest) -> bytes:
        return self._keys.tenant(request.headers)


def _kept(answer: KeptAnswer) -> KeptResponse | None:
    try:
        return KeptResponse(answer)
    except (msgspec.MsgspecError, RecursionError):  # another version's
        return None


def _ignore(_stream_id: str, _kept: KeptResponse) -> None:
    """Do nothing: a deleted response is not read."""


def _guarded_part(exchange: Exchange, call: Then) -> bool:
    guarded(exchange, call)
    return False


def _cancel(future: Future[Any]) -> None:
    future.cancel()


def _fail(error: BaseException) -> None:
    raise error


def _show(kept: KeptResponse, exchange: Exchange) -> None:
    exchange.respond(json_response(200, kept.response))


def _print(kept: KeptResponse, end: End, after: int, exchange: Exchange) -> None:
    """Write the events of a response that has ended."""
    writer = BlockWriter(ResponsePrinter(kept.begun), after)
    usage = kept.usage(end)
    found = writer.begin(usage)
    found += writer.write(kept.events)
    found += writer.finish(end, usage)
    exchange.begin_stream()
    exchange.write(b"".join([event.data for event in found]))
    exchange.finish()


def _list_items(kept: KeptResponse, query: dict[str, str], exchange: Exchange) -> None:
    items = kept.input()
    order, limit = query.get("order", "desc"), query.get("limit", str(_LISTED))
    if order not in ("asc", "desc"):
        raise bad_field("order", "order: allowed: asc, desc")
    is_number = limit.isascii() and limit.isdigit() and len(limit) <= _MAX_DIGITS
    if not (is_number and 1 <= int(limit) <= _MAX_LISTED):
        raise bad_field("limit", f"limit: allowed: 1 to {_MAX_LISTED}")
    places = range(len(items)) if order == "asc" else range(len(items) - 1, -1, -1)
    after = query.get("after")
    if after is not None:
        at = items.find(after)
        if at is None:
            raise bad_field("after", "after: allowed: the id of an item of this input")
        places = places[places.index(at) + 1 :]
    page = [items.item(at) for at in places[: int(limit)]]  # there may be thousands of others
    shown = [shown_item(item, item_id) for item_id, item in page]
    first, last = (page[0][0], page[-1][0]) if page else (None, None)
    found = InputItemList(shown, first, last, has_more=len(page) < len(places))
    exchange.respond(json_response(200, found))


def _parts(request: HttpRequest) -> tuple[str, str]:
    """The id and what follows it in a path below `PREFIX`."""
    response_id, _, rest = unquote(request.path).removeprefix(PREFIX).partition("/")
    return response_id, rest


def _no_such_path(request: HttpRequest) -> ApiError:
    what = f"no such path for {request.method}: {request.path[:200]}"
    return ApiError(404, what, code="not_found")


def _query(query: str, allowed: Sequence[str]) -> dict[str, str]:
    """The last value of each parameter of a query. Raises: ApiError."""
    given = parse_qs(query, keep_blank_values=True)
    for name in given:
        if name not in allowed:
            what = f"{name[:100]}: allowed in the query: {', '.join(allowed)}"
            raise bad_field(name[:100], what)
    return {name: values[-1] for name, values in given.items()}


def _cursor(request: HttpRequest, response_id: str, query: dict[str, str]) -> StreamCursor:
    """The client's position in a stream. Raises: ApiError."""
    text = last_event_id(request)
    if text is not None:
        event_id = parse_event_id(text)
        if str(event_id.answer) != response_id:
            what = f"last-event-id: got an event of {event_id.answer}, allowed: of {response_id}"
            raise bad_field("last-event-id", what[:300])
        return event_id.cursors[0]
    after = query.get("starting_after")
    if after is None:
        return StreamCursor()
    if not (after.isascii() and after.isdigit() and len(after) <= _MAX_DIGITS):
        what = f"starting_after: got {after[:100]!r}, allowed: the sequence_number of an event"
        raise bad_field("starting_after", what)
    return StreamCursor(number=int(after))
