"""Turns one prompt into token ids: chat template, then tokeniser. Queries of ids become text.

Any error, a template's included, is the answer to that request alone.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.errors import BadRequest, Summary, brief
from slipstream_ipc.messages import Fault, Render, Rendered
from slipstream_ipc.validation.chat_template import read_template
from slipstream_worker.detokenizer.panics import is_panic
from slipstream_worker.tokenizer.bad_words import bad_word_ids
from slipstream_worker.tokenizer.long_prompts import is_too_long

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 4 * 2**20  # of text in the answer to a query; it has to fit a message


def render(tokenizer: Any, request: Render) -> Rendered:
    """The ids of a prompt, or the text of ids. Any error is the answer to this request alone."""
    try:
        if request.token_ids is not None:
            return _decoded(tokenizer, request, request.token_ids)
        if request.messages and not tokenizer.chat_template:
            fault = Fault("bad_request", "this model has no chat template", "messages")
            return Rendered(request.key, fault=fault)
        ids = _prompt_ids(tokenizer, request)
        if request.is_query and 0 < request.max_tokens < len(ids):
            raise _too_long(request, f"{len(ids)} tokens")
        words = bad_word_ids(tokenizer, request.bad_words)
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
    )


def _prompt_ids(tokenizer: Any, request: Render) -> list[int]:
    """Raises BadRequest, and whatever the template raises."""
    text, add_special_tokens = request.text, True
    if request.messages:
        template = request.template
        tools, kwargs = read_template(template)
        text, add_special_tokens = (
            tokenizer.apply_chat_template(
                [
                    template_message(message, f"messages[{index}]")
                    for index, message in enumerate(request.messages)
                ],
                tools=tools,
                tokenize=False,
                add_generation_prompt=template.add_generation_prompt,
                continue_final_message=template.continue_final_message,
                **kwargs,
            ),
            False,
        )
    if text is None:
        return []

    def num_tokens(part: str) -> int:
        return len(tokenizer(part, add_special_tokens=False)["input_ids"])

    if is_too_long(text, request.max_tokens, num_tokens):
        given = Summary(f"{len(text)} characters, more than {request.max_tokens} tokens")
        raise _too_long(request, given)
    if request.add_special_tokens is not None:
        add_special_tokens = request.add_special_tokens
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def _too_long(request: Render, given: str) -> BadRequest:
    """The error for a prompt that is too long. A stream's prompt leaves room for one token."""
    most = request.max_tokens if request.is_query else request.max_tokens - 1
    field = "with_strings" if request.with_strings else "prompt"
    return BadRequest(field, given, f"at most {most} tokens")


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
