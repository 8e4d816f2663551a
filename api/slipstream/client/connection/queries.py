"""A client's queries beside its streams: tokenize, detokenize, embed, inspect; cancel, recall,
locate.

- A query is sent again after each attach until it is answered, so it survives what a stream
  survives. Other answers are ignored.
- One about a stream of this client's that the server has lost is asked again behind the stream's
  new Submit: the answer to the first one would be that there is no such stream.
- A query whose future is cancelled is dropped, as it may be large and a server may be away for
  long. Callers cancel in their own threads, so the removal is posted to the connection's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from secrets import token_bytes
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from slipstream.answers.functions import tool_definitions
from slipstream.answers.tool_calls import with_call_ids
from slipstream.errors import SlipstreamError, bad_request, error_from
from slipstream.request.prompts import checked_prompt, checked_utf8
from slipstream.request.requests import fits_message
from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.errors import BadRequest, ProtocolError, Summary
from slipstream_ipc.messages import (
    MAX_IDENTITY_BYTES,
    MAX_LORA_NAME_CHARS,
    MAX_LORA_PATH_CHARS,
    AdapterChanged,
    Cancel,
    Cancelled,
    ChangeAdapter,
    Detokenize,
    Detokenized,
    Embed,
    Embedded,
    Inspect,
    Inspected,
    Locate,
    Located,
    ModelCard,
    Recall,
    Recalled,
    TemplateOptions,
    Tokenize,
    Tokenized,
)
from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES
from slipstream_ipc.validation.chat_template import check_token_ids, template_options
from slipstream_ipc.validation.media import sizes_of
from slipstream_ipc.validation.sampling_params import token_ids_from

Query = Tokenize | Detokenize | Cancel | Recall | Locate | Inspect | ChangeAdapter | Embed
Found = (
    Tokenized | Detokenized | Cancelled | Recalled | Located | Inspected | AdapterChanged | Embedded
)


Send = Callable[[Query], bool]
Post = Callable[[Callable[[], None]], None]


@dataclass(eq=False, slots=True, weakref_slot=True)
class PendingQuery:
    """An unanswered query. post: see `PendingQueries.ask`."""

    query: Query
    future: Future[Any]
    since: float
    post: Post


class PendingQueries:
    """The unanswered queries of one client."""

    def __init__(self) -> None:
        self._asked: dict[int, PendingQuery] = {}  # by number
        self.due: dict[int, None] = {}  # numbers of those not sent yet; the same dict for good
        self._next_number = 0

    def ask(self, query: Query, future: Future[Any], now: float, post: Post) -> None:
        """Fulfil `future` with the answer to `query`, whose number is set here.

        post: calls its argument in the connection's thread; may itself be called from any thread.
        """
        asked = PendingQuery(query, future, now, post)
        self._add(asked)
        reference = ref(asked)  # its future may be kept for longer

        def on_done(future: Future[Any]) -> None:
            if future.cancelled():
                post(partial(self._forget, reference))

        future.add_done_callback(on_done)

    def ask_again(self, stream_ids: frozenset[bytes]) -> None:
        """Queue anew what was asked about these streams. Earlier answers are ignored."""
        for number, asked in list(self._asked.items()):
            if number not in self.due and not stream_ids.isdisjoint(_streams_of(asked.query)):
                self._add(self._asked.pop(number))

    def take_all(self, *, but_of_streams: bool = False) -> list[PendingQuery]:
        """Remove and return all queries, to be asked elsewhere. but_of_streams: leave those that
        only this server can answer: about streams, and changes of its adapters.
        """
        taken = [
            number
            for number, asked in self._asked.items()
            if not (but_of_streams and isinstance(asked.query, Cancel | Recall | ChangeAdapter))
        ]
        for number in taken:
            self.due.pop(number, None)
        return [self._asked.pop(number) for number in taken]

    def refill(self) -> None:
        """Queue all queries anew, after an attach."""
        self.due.clear()
        self.due.update(dict.fromkeys(self._asked))

    def flush(self, send: Send) -> None:
        """Send due queries until `send` returns False."""
        while self.due:
            number = next(iter(self.due))
            if not send(self._asked[number].query):
                return
            del self.due[number]

    def answer(self, found: Found) -> None:
        """Fulfil a query's future. Raises: ProtocolError where the answer does not match it."""
        asked = self._asked.get(found.number)
        if asked is None:
            return
        _check(asked.query, found)
        del self._asked[found.number]
        self.due.pop(found.number, None)
        if not asked.future.set_running_or_notify_cancel():
            return
        # a refused change, or one of several inputs, has more to say than its fault
        bare = Cancelled | Located | Inspected | AdapterChanged | Embedded
        fault = None if isinstance(found, bare) else found.fault
        if fault is not None:
            asked.future.set_exception(error_from(fault))
        elif isinstance(found, Recalled) and isinstance(asked.query, Recall):
            asked.future.set_result(_with_call_ids(found, asked.query.stream_id))
        else:
            asked.future.set_result(found)

    def fail(self, error: Callable[[], SlipstreamError], asked_until: float | None = None) -> None:
        """Fail the queries asked up to `asked_until`, by default all, each with a new error."""
        for number, asked in list(self._asked.items()):
            if asked_until is None or asked.since <= asked_until:
                self._asked.pop(number, None)
                self.due.pop(number, None)
                if asked.future.set_running_or_notify_cancel():
                    asked.future.set_exception(error())

    def _add(self, asked: PendingQuery) -> None:
        number = self._next_number
        self._next_number = (number + 1) % 2**32
        asked.query = replace(asked.query, number=number)
        self._asked[number] = asked
        self.due[number] = None

    def _forget(self, reference: ref[PendingQuery]) -> None:
        asked = reference()
        if asked is not None and self._asked.get(asked.query.number) is asked:
            del self._asked[asked.query.number]
            self.due.pop(asked.query.number, None)


def _streams_of(query: Query) -> Sequence[bytes]:
    match query:
        case Recall():
            return (query.stream_id,)
        case Cancel():
            return query.stream_ids
        case _:
            return ()


def checked_template(
    tools: Any = None,
    chat_template_kwargs: Any = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
) -> TemplateOptions:
    """Checked options of a chat template; None is the default. Raises: BadRequestError."""
    try:
        return template_options(
            tool_definitions(tools),
            chat_template_kwargs,
            add_generation_prompt=add_generation_prompt is not False,
            continue_final_message=bool(continue_final_message),
        )
    except BadRequest as error:
        raise bad_request(error) from None


def ids_of(found: Tokenized) -> list[int]:
    """The token ids of a checked answer."""
    ids: list[int] = u32(found.token_ids).tolist()
    return ids


def new_tokenize(
    prompt: Any,
    template: TemplateOptions | None = None,
    *,
    add_special_tokens: bool | None = None,
    with_strings: bool = False,
) -> Tokenize:
    """A Tokenize; `PendingQueries.ask` sets its number. Raises: BadRequestError."""
    try:
        text, token_ids, messages, media, _ = checked_prompt(prompt)
        if token_ids:
            raise BadRequest("prompt", Summary("token ids"), "a string, or a list of chat messages")
        asked = Tokenize(
            0,
            text,
            messages,
            template or TemplateOptions(),
            add_special_tokens,
            with_strings,
            media=sizes_of(media),
        )
        if not fits_message(replace(asked, tenant=bytes(MAX_IDENTITY_BYTES))):
            given = Summary("a query larger than a message")
            raise BadRequest("prompt", given, f"at most {MAX_MESSAGE_BYTES} bytes")
    except BadRequest as error:
        raise bad_request(error) from None
    return asked


def new_detokenize(
    token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
    model: ModelCard,
    *,
    skip_special_tokens: bool = False,
) -> Detokenize:
    """A Detokenize; `PendingQueries.ask` sets its number. Raises: BadRequestError."""
    try:
        column = pack_u32(_ids(token_ids))
        check_token_ids(column, model)
    except BadRequest as error:
        raise bad_request(error) from None
    return Detokenize(0, column, skip_special_tokens)


def new_recall(stream_id: str, scope: bytes = b"", *, forget: bool = False) -> Recall:
    """A Recall; `PendingQueries.ask` sets its number.

    stream_id: 32 hexadecimal digits. scope: the one in the stream's `KeepOptions`. forget: keep the
    answer no longer, and end the stream if it still runs.
    """
    return Recall(0, bytes.fromhex(stream_id), scope, forget)


def new_change(name: object, path: object = "", *, load_inplace: object = False) -> ChangeAdapter:
    """A ChangeAdapter; `PendingQueries.ask` sets its number. path: empty: unload it.

    Raises: BadRequestError.
    """
    try:
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_LORA_NAME_CHARS:
            allowed = f"a string of 1 to {MAX_LORA_NAME_CHARS} characters"
            raise BadRequest("lora_name", name, allowed)
        if not isinstance(path, str) or len(path) > MAX_LORA_PATH_CHARS:
            raise BadRequest(
                "lora_path", path, f"a path of at most {MAX_LORA_PATH_CHARS} characters"
            )
        if not isinstance(load_inplace, bool):
            raise BadRequest("load_inplace", load_inplace, "true or false")
        for field, text in (("lora_name", name), ("lora_path", path)):
            checked_utf8(field, text)
    except BadRequest as error:
        raise bad_request(error) from None
    return ChangeAdapter(0, token_bytes(16), name, path, load_inplace)


def check_changed(changed: AdapterChanged) -> None:
    """Raises: BadRequestError, OverloadedError for a change of adapters that was refused."""
    if changed.fault is not None:
        raise error_from(changed.fault)


def _with_call_ids(found: Recalled, stream_id: bytes) -> Recalled:
    """The answer, with an id for each call that the model gave none."""
    answer = found.answer
    if answer is None or not answer.events:
        return found
    return replace(found, answer=replace(answer, events=with_call_ids(answer.events, stream_id)))


def _ids(given: object) -> npt.NDArray[np.uint32]:
    try:
        return token_ids_from(given)
    except BadRequest:
        raise BadRequest("token_ids", given, "a sequence of integers in [0, 2**32)") from None


def _check(query: Query, found: Found) -> None:
    match query, found:
        case Tokenize(), Tokenized():
            num_ids = len(u32(found.token_ids, "token_ids"))
            is_right = found.fault is not None or (
                len(found.strings) == num_ids * query.with_strings
            )
        case Detokenize(), Detokenized():
            is_right = True
        case Cancel(), Cancelled():
            is_right = len(found.found) == len(query.stream_ids)
        case (
            (Recall(), Recalled()) | (Inspect(), Inspected()) | (ChangeAdapter(), AdapterChanged())
        ):
            is_right = True
        case Embed(), Embedded():
            num = len(query.texts) or len(query.counts) // 4
            is_right = found.fault is not None or (
                len(u32(found.num_tokens, "num_tokens")) == num
                and len(found.vectors) % (4 * num) == 0
            )
        case Locate(), Located():
            is_right = len(found.moves) in (0, len(query.stream_ids))  # 0: nothing was looked up
        case _:
            is_right = False
    if not is_right:
        raise ProtocolError("an answer that does not fit its query")
