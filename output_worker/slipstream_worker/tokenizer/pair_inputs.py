"""Turns pairs of texts into token ids: of a query and a document, one input for a cross-encoder.

- The tokenizer puts its special tokens around both, and tells their types apart. Where a template
  is given, it writes both into one text instead.
- Long pairs are cut as transformers does by default, the longer text first (`kept_lens`). Its own
  truncation changes the tokenizer and so cannot be used beside other threads.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import Fault, Render, Rendered
from slipstream_worker.tokenizer.embedding_inputs import slow_tokenizer
from slipstream_worker.tokenizer.long_prompts import tokens_if_too_long

_NEEDS_TEMPLATE = Fault(
    "bad_request",
    "this model has learnt pairs in a template: start the server with --chat-template FILE, which "
    "writes the messages of the roles query and document, or give whole prompts to /classify",
)
_NO_INSTRUCTION = BadRequest(
    "instruction", Summary("a text"), "none: pairs of this model have no template (--chat-template)"
).fault


def pairs_rendered(
    tokenizer: Any, request: Render, template: str | None, template_kwargs: dict[str, Any]
) -> Rendered:
    """The ids of all pairs of a query, or the fault of the first that is too long. template: in
    which pairs are written, with its variables; None: the tokenizer puts them together. Raises
    whatever the tokenizer and the template raise.
    """
    if template is None and (request.needs_template or request.template_kwargs):
        fault = _NEEDS_TEMPLATE if request.needs_template else _NO_INSTRUCTION
        return Rendered(request.key, fault=fault)
    if not tokenizer.is_fast and (request.max_first or request.max_second):
        raise slow_tokenizer()
    if template is not None:
        return _templated(tokenizer, request, template, template_kwargs)
    most = request.truncate_to or request.max_tokens
    has_types = "token_type_ids" in tokenizer.model_input_names
    columns: list[list[int]] = []
    first_lens: list[int] = []
    for index, (text, pair) in enumerate(zip(request.texts, request.pairs, strict=True)):
        if _may_not_be_cut(request):
            num = _num_if_too_long(tokenizer, (text, pair), request.max_tokens)
            if num:
                return _wrong(request, index, num, most)
        ids, types = _pair(tokenizer, text, pair, request)
        if not 0 < len(ids) <= most:
            return _wrong(request, index, len(ids), most)
        columns.append(ids)
        if has_types:
            first_lens.append(_first_len(types))
    return _rendered(request, columns, first_lens)


def kept_lens(first: int, second: int, most: int) -> tuple[int, int]:
    """Tokens that are kept of two texts with so many, if both may have `most`: of the longer one
    less, until both are as long.
    """
    if first + second <= most:
        return first, second
    half = most // 2
    if min(first, second) <= half:
        short = min(first, second)
        return (short, most - short) if first <= second else (most - short, short)
    return (half, most - half) if first <= second else (most - half, half)


def _pair(tokenizer: Any, text: str, pair: str, request: Render) -> tuple[list[int], list[int]]:
    """The ids and types of a pair, cut as the request says."""
    adds, most = request.add_special_tokens is not False, request.truncate_to
    if not tokenizer.is_fast:
        cut = {"truncation": "longest_first", "max_length": most} if most else {}
        given = tokenizer(text, pair, add_special_tokens=adds, **cut)
        return given["input_ids"], given.get("token_type_ids") or []
    backend = tokenizer.backend_tokenizer
    first = backend.encode(text, add_special_tokens=False)
    second = backend.encode(pair, add_special_tokens=False)
    if request.max_first:
        first.truncate(request.max_first)
    if request.max_second:
        second.truncate(request.max_second)
    if most:
        room = max(0, most - (backend.num_special_tokens_to_add(is_pair=True) if adds else 0))
        side = "left" if request.truncates_left else "right"
        lens = kept_lens(len(first), len(second), room)
        first.truncate(lens[0], direction=side)
        second.truncate(lens[1], direction=side)
    whole = backend.post_process(first, second, add_special_tokens=adds)
    return whole.ids, whole.type_ids


def _first_len(types: list[int]) -> int:
    """The number of tokens before the first of type 1. Raises: BadRequest."""
    num = types.index(1) if 1 in types else len(types)
    if any(types[:num]) or any(each != 1 for each in types[num:]):
        raise BadRequest("input", Summary("types of tokens that are not 0, then 1"), "others")
    return num


def _templated(
    tokenizer: Any, request: Render, template: str, template_kwargs: dict[str, Any]
) -> Rendered:
    if request.truncate_to:
        allowed = "none with a template, whose end would be cut; max_tokens_per_doc cuts documents"
        raise BadRequest("truncate_prompt_tokens", request.truncate_to, allowed)
    kwargs = {**template_kwargs}
    if request.template_kwargs:
        kwargs |= msgspec.json.decode(request.template_kwargs, type=dict[str, Any])
    columns = []
    for index, (text, pair) in enumerate(zip(request.texts, request.pairs, strict=True)):
        turns = [
            {"role": "query", "content": _beginning(tokenizer, text, request.max_first)},
            {"role": "document", "content": _beginning(tokenizer, pair, request.max_second)},
        ]
        prompt = tokenizer.apply_chat_template(
            turns, chat_template=template, tokenize=False, **kwargs
        )
        num = _num_if_too_long(tokenizer, (prompt,), request.max_tokens)
        if num:
            return _wrong(request, index, num, request.max_tokens)
        adds = request.add_special_tokens is not False
        ids = tokenizer(prompt, add_special_tokens=adds)["input_ids"]
        if not 0 < len(ids) <= request.max_tokens:
            return _wrong(request, index, len(ids), request.max_tokens)
        columns.append(ids)
    return _rendered(request, columns, [])


def _beginning(tokenizer: Any, text: str, most: int) -> str:
    """The beginning of a text that has so many tokens; 0: all of it."""
    if not most:
        return text
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    if len(encoding) <= most:
        return text
    end: int = encoding.offsets[most - 1][1]
    return text[:end]


def _may_not_be_cut(request: Render) -> bool:
    return not (request.truncate_to or request.max_first or request.max_second)


def _num_if_too_long(tokenizer: Any, texts: tuple[str, ...], most: int) -> int:
    """The tokens of the first text that is too long by itself, at least; 0: none is."""

    def num_tokens(part: str) -> int:
        return len(tokenizer(part, add_special_tokens=False)["input_ids"])

    return next((num for each in texts if (num := tokens_if_too_long(each, most, num_tokens))), 0)


def _rendered(request: Render, columns: list[list[int]], first_lens: list[int]) -> Rendered:
    whole = np.concatenate([np.asarray(each, np.uint32) for each in columns])
    counts = pack_u32([len(each) for each in columns])
    return Rendered(request.key, pack_u32(whole), counts=counts, first_lens=pack_u32(first_lens))


def _wrong(request: Render, index: int, num: int, most: int) -> Rendered:
    fault = BadRequest("input", Summary(f"{num} tokens"), f"1 to {most} tokens").fault
    return Rendered(request.key, fault=fault, index=index)
