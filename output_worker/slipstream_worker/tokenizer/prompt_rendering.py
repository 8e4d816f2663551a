"""Turns one prompt into token ids: chat template, then tokeniser. Queries of ids become text.

Any error, a template's included, is the answer to that request alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.errors import BadRequest, Summary, TooManyTokens, brief
from slipstream_ipc.messages import (
    MAX_LEFT_OUT,
    MAX_PREDICTION_TOKENS,
    AnswerOptions,
    AnswerSettings,
    ChatMessage,
    Fault,
    LeftOut,
    ReasoningIds,
    Render,
    Rendered,
    TurnChanges,
)
from slipstream_ipc.validation.chat_template import read_template
from slipstream_worker.detokenizer.panics import is_panic
from slipstream_worker.formats.call_grammar import (
    format_paths,
    has_format,
    refusal,
    without_format,
)
from slipstream_worker.tokenizer.answer_settings import ReadFormat, asks_for_grammar
from slipstream_worker.tokenizer.bad_words import bad_word_ids
from slipstream_worker.tokenizer.embedding_inputs import inputs_rendered
from slipstream_worker.tokenizer.image_placeholders import ImagePlaceholders
from slipstream_worker.tokenizer.long_prompts import SLICE_CHARS, tokens_if_too_long
from slipstream_worker.tokenizer.open_turn import ChatTexts, open_turn
from slipstream_worker.tokenizer.pair_inputs import pairs_rendered
from slipstream_worker.tokenizer.template_dialect import TemplateDialect
from slipstream_worker.tokenizer.turn_forms import FittedChat, Shape, fit

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 4 * 2**20  # of text in the answer to a query; it has to fit a message
# longer than what any template writes behind the last message to introduce an answer
_MAX_INTRODUCTION_CHARS = 1024


class ChatTraits(NamedTuple):
    """The properties of a tokenizer's chats. format: of answers; None where it is unknown. refused:
    shapes of chats that the template does not take, without tools and with them. forced: the format
    of forced calls, where `format` has none. placeholders: of images; None: it takes none.
    template_kwargs: variables of the template that a request may replace. pair_template: that pairs
    of texts to compare are written in, if any.
    """

    dialect: TemplateDialect = TemplateDialect()
    format: ReadFormat | None = None
    refused: tuple[frozenset[Shape], frozenset[Shape]] = (frozenset(), frozenset())
    forced: ReadFormat | None = None
    placeholders: ImagePlaceholders | None = None
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    pair_template: str | None = None


_PLAIN = ChatTraits()


def render(tokenizer: Any, request: Render, traits: ChatTraits = _PLAIN) -> Rendered:
    """The ids of a prompt, or the text of ids. Any error is the answer to this request alone."""
    try:
        if request.token_ids is not None:
            return _decoded(tokenizer, request, request.token_ids)
        if request.pairs:
            kwargs = dict(traits.template_kwargs)
            return pairs_rendered(tokenizer, request, traits.pair_template, kwargs)
        if request.texts:
            return inputs_rendered(tokenizer, request)
        if request.messages and not tokenizer.chat_template:
            fault = Fault("bad_request", "this model has no chat template", "messages")
            return Rendered(request.key, fault=fault)
        prompt = _prompt(tokenizer, request, traits)
        ids = prompt.ids
        if request.is_query and 0 < request.max_tokens < len(ids):
            raise _too_long(request, f"{len(ids)} tokens", len(ids))
        words = bad_word_ids(tokenizer, request.bad_words)
        prediction_ids = _prediction_ids(tokenizer, request)
        strings = tokenizer.convert_ids_to_tokens(ids) if request.with_strings else ()
        if request.with_strings:
            _check_size("prompt", "".join(strings))
    except BadRequest as error:
        return Rendered(request.key, fault=error.fault)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        field = "messages" if request.messages else "prompt"
        if request.token_ids is not None:
            field = "token_ids"
        # only the client gets the text: it may quote the prompt, which must not be logged
        logger.debug("a prompt could not be rendered: %s", type(error).__name__)
        why = brief(f"{field}: {error}")
        return Rendered(request.key, fault=Fault("bad_request", why, field))
    return Rendered(
        request.key,
        pack_u32(np.asarray(ids, np.uint32)),
        bad_word_ids=pack_u32([token_id for word in words for token_id in word]),
        bad_word_counts=pack_u32([len(word) for word in words]),
        strings=tuple(strings),
        answer=prompt.answer,
        call_grammar=prompt.call_grammar,
        reasoning=prompt.reasoning,
        frame=prompt.frame,
        changed_turns=prompt.changed_turns,
        formats=prompt.formats,
        is_for_formats=prompt.is_for_formats,
        prediction_ids=pack_u32(prediction_ids),
    )


class _Chat(NamedTuple):
    """The chat of a request, as its template is given it.

    tools: as the request has them; shown_tools: as the template is given them.
    """

    tokenizer: Any
    turns: Sequence[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None
    shown_tools: list[dict[str, Any]] | None
    kwargs: Mapping[str, Any]

    def text(
        self, *, end: int | None = None, is_prompted: bool = False, is_continued: bool = False
    ) -> str:
        """The chat up to the turn `end`. Raises whatever the template raises."""
        text: str = self.tokenizer.apply_chat_template(
            self.turns[:end],
            tools=self.shown_tools,
            tokenize=False,
            add_generation_prompt=is_prompted,
            continue_final_message=is_continued,
            **self.kwargs,
        )
        return text


class _Prompt(NamedTuple):
    """A prompt's ids, and of its answer what Rendered has."""

    ids: list[int]
    answer: AnswerSettings | None = None
    call_grammar: str = ""
    reasoning: ReasoningIds | None = None
    frame: str = ""
    changed_turns: TurnChanges = ()
    formats: LeftOut = ()
    is_for_formats: bool = False


def _prompt(tokenizer: Any, request: Render, traits: ChatTraits) -> _Prompt:
    """Raises BadRequest, and whatever the template raises."""
    if not request.messages:
        if request.text is None:
            return _Prompt([])
        add_special_tokens = request.add_special_tokens is not False
        return _Prompt(_ids(tokenizer, request.text, request, add_special_tokens))
    chat, fitted = _fitted_chat(tokenizer, request, traits)
    text = fitted.text
    if request.media:
        text = _with_images(text, chat, fitted, request, traits)
    ids = _ids(tokenizer, text, request, bool(request.add_special_tokens))
    prompt = _Prompt(ids, changed_turns=fitted.changes)
    if request.answer is None:
        return prompt
    return _read_answer(prompt, chat, fitted, request, request.answer, traits)


def _fitted_chat(tokenizer: Any, request: Render, traits: ChatTraits) -> tuple[_Chat, FittedChat]:
    """The chat as the template takes it. Raises BadRequest, and whatever the template raises."""
    template = request.template
    tools, own = read_template(template)
    kwargs = {**traits.template_kwargs, **own}
    if request.answer is not None and request.answer.tool_choice == "none":
        tools = None
    shown = None
    if tools is not None:
        shown = [{**each, "function": without_format(each["function"])} for each in tools]

    def chat_of(messages: Sequence[ChatMessage]) -> _Chat:
        return _Chat(tokenizer, traits.dialect.turns(messages), tools, shown, kwargs)

    fitted = fit(
        request.messages,
        lambda messages: chat_of(messages).text(
            is_prompted=template.add_generation_prompt, is_continued=template.continue_final_message
        ),
        traits.refused[tools is not None],
        is_continued=template.continue_final_message,
    )
    return chat_of(fitted.messages), fitted


def _with_images(
    text: str, chat: _Chat, fitted: FittedChat, request: Render, traits: ChatTraits
) -> str:
    """A chat's text with all that stands for its images. Raises: BadRequest."""
    placeholders = traits.placeholders
    if placeholders is None:
        raise BadRequest("media", Summary("an image"), "text alone, with this model")
    placeholders.check_texts(request.messages)
    if [*_items(fitted.messages)] != [*range(len(request.media))]:
        given = Summary("images in turns that the model's chat template takes in another order")
        raise BadRequest("messages", given, "images in turns of the user")
    if text.count(placeholders.token) != len(request.media):
        _refuse_unshown(chat, request.messages, traits.dialect, placeholders.token)
    return placeholders.expanded(text, request.media, request.max_tokens)


def _items(messages: Sequence[ChatMessage]) -> Iterator[int]:
    for message in messages:
        yield from (part for part in message.parts or () if not isinstance(part, str))


def _refuse_unshown(
    chat: _Chat, messages: Sequence[ChatMessage], dialect: TemplateDialect, token: str
) -> None:
    """Raises BadRequest for the first turn whose images the template does not show, one of each
    role being tried; returns where it shows those.
    """
    tried: set[str] = set()
    bare = [replace(each, parts=None) for each in messages]
    for index, message in enumerate(messages):
        items = [*_items([message])]
        if not items or message.role in tried:
            continue
        tried.add(message.role)
        alone = [*bare[:index], message, *bare[index + 1 :]]
        try:
            num = chat._replace(turns=dialect.turns(alone)).text().count(token)
        except Exception:  # a template raises whatever it likes
            num = 0
        if num != len(items):
            given = Summary(f"an image in a turn of {message.role!r}")
            allowed = "text: the model's chat template shows no images there"
            raise BadRequest(f"media[{items[0]}]", given, allowed)


def _ids(tokenizer: Any, text: str, request: Render, add_special_tokens: bool) -> list[int]:
    """Raises BadRequest if there are too many."""

    def num_tokens(part: str) -> int:
        return len(tokenizer(part, add_special_tokens=False)["input_ids"])

    num = tokens_if_too_long(text, request.max_tokens, num_tokens)
    if num:
        given = Summary(f"{len(text)} characters, more than {request.max_tokens} tokens")
        raise _too_long(request, given, num)
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def _prediction_ids(tokenizer: Any, request: Render) -> list[int]:
    """The ids of a prediction, or of the beginning of a long one. Its end may be cut anywhere, and
    a border of slices be tokenised otherwise than an answer would be: it foresees, no more.
    """
    most = min(request.max_tokens or MAX_PREDICTION_TOKENS, MAX_PREDICTION_TOKENS)
    ids: list[int] = []
    for begin in range(0, len(request.prediction), SLICE_CHARS):
        if len(ids) >= most:
            break
        part = request.prediction[begin : begin + SLICE_CHARS]
        ids += tokenizer(part, add_special_tokens=False)["input_ids"]
    return ids[:most]


def _read_answer(
    prompt: _Prompt,
    chat: _Chat,
    fitted: FittedChat,
    request: Render,
    options: AnswerOptions,
    traits: ChatTraits,
) -> _Prompt:
    """The prompt, with how its answer is read. Raises BadRequest."""
    forces_calls = options.forces_calls
    if forces_calls and not chat.tools:
        raise refusal(options.tool_choice, "a request without tools")
    found = traits.format
    if forces_calls and traits.forced is not None:
        found = traits.forced
    if found is None:
        if forces_calls:
            raise refusal(options.tool_choice, "answers of this model, whose format is not known")
        return prompt._replace(formats=_formats(chat.tools))
    opened = _opened(chat, fitted, request, found.literals)
    settings = found.settings(options, chat.tools, opened)
    reasoning, grammar, frame = found.reasoning_ids(settings, opened), "", ""
    if forces_calls:
        grammar = found.call_grammar(
            settings, chat.tools or (), opened, is_followed=reasoning is not None
        )
    elif request.structured is not None:
        frame, reasoning = found.structured_frame(
            settings, chat.tools or (), opened, reasoning, request.structured
        )
    elif chat.tools:
        grammar, reasoning = found.free_calls(settings, chat.tools, opened, reasoning)
        is_for_formats = not asks_for_grammar(options, chat.tools)
        prompt = prompt._replace(formats=_formats(chat.tools), is_for_formats=is_for_formats)
    if found.format.channels is not None and reasoning is not None:
        # a grammar's, not only what is behind
        is_whole = bool(grammar) or request.structured is not None
        reasoning = replace(reasoning, in_grammar=is_whole)
    return prompt._replace(answer=settings, call_grammar=grammar, reasoning=reasoning, frame=frame)


def _formats(tools: Sequence[Mapping[str, Any]] | None) -> LeftOut:
    """The paths of the formats of custom tools."""
    functions = [each["function"] for each in tools or ()]
    paths = [path for each in functions if has_format(each) for path in format_paths(each)]
    return tuple(paths[:MAX_LEFT_OUT])


def _opened(chat: _Chat, fitted: FittedChat, request: Render, literals: Sequence[str]) -> str:
    """The part of the answer that the prompt contains already; empty if the template refuses to
    tell.
    """
    try:
        return _open_turn(chat, fitted, request, literals)
    except Exception as error:  # it has written the prompt; the answer is read from its beginning
        logger.debug("a prompt's open turn is unknown: %s", type(error).__name__)
        return ""


def _open_turn(chat: _Chat, fitted: FittedChat, request: Render, literals: Sequence[str]) -> str:
    """Raises whatever the template raises."""
    messages, text = fitted.messages, fitted.text
    if request.template.add_generation_prompt:
        introduction = text[-_MAX_INTRODUCTION_CHARS:]
        if not any(each in introduction for each in literals):
            return ""  # as nearly always; the chat need not be rendered again
        return open_turn(ChatTexts(text, chat.text(), text, messages[-1].content), literals)
    if request.template.continue_final_message:
        if len(messages) == 1:  # a template takes no chat without turns
            content = messages[-1].content
            return content if text.endswith(content) else content.strip()
        closed, prompted = chat.text(end=-1), chat.text(end=-1, is_prompted=True)
        return open_turn(ChatTexts(text, closed, prompted, messages[-2].content), literals)
    return ""


def _too_long(request: Render, given: str, num_tokens: int) -> BadRequest:
    """The error for a prompt that is too long. A stream's prompt leaves room for one token.

    num_tokens: of the prompt, at least.
    """
    most = request.max_tokens if request.is_query else request.max_tokens - 1
    field = "with_strings" if request.with_strings else "prompt"
    return TooManyTokens(field, given, f"at most {most} tokens", num_tokens, most)


def _decoded(tokenizer: Any, request: Render, column: bytes) -> Rendered:
    ids = u32(column).tolist()  # checked by the worker
    text = tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens)
    _check_size("token_ids", text)
    return Rendered(request.key, text=text)


def _check_size(field: str, text: str) -> None:
    num_bytes = len(text.encode())
    if num_bytes > MAX_ANSWER_BYTES:
        allowed = f"an answer of at most {MAX_ANSWER_BYTES} bytes"
        raise BadRequest(field, Summary(f"{num_bytes} bytes of text"), allowed)
