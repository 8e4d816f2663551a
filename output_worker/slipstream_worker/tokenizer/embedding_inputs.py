"""Turns the texts of a query for pooling into token ids, each by itself, and cuts long ones. Pairs
of texts are those of `pair_inputs`.

A text that is cut keeps the special tokens that the tokenizer adds, as with transformers' own
truncation, which changes the tokenizer and so cannot be used beside other threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import Render, Rendered
from slipstream_worker.tokenizer.long_prompts import tokens_if_too_long


def inputs_rendered(tokenizer: Any, request: Render) -> Rendered:
    """The ids of all texts of a query, or the fault of the first that has none or too many. Raises
    whatever the tokenizer raises.
    """

    def num_tokens(part: str) -> int:
        return len(tokenizer(part, add_special_tokens=False)["input_ids"])

    adds = request.add_special_tokens is not False
    most = request.truncate_to or request.max_tokens
    columns: list[np.ndarray[Any, np.dtype[np.uint32]]] = []
    for index, text in enumerate(request.texts):
        if not request.truncate_to and not request.max_first:
            num = tokens_if_too_long(text, most, num_tokens)
            if num:
                given = Summary(f"{len(text)} characters, more than {most} tokens")
                return _wrong(request, index, given, most)
        ids = tokenizer(text, add_special_tokens=adds)["input_ids"]
        if request.max_first or (len(ids) > most and request.truncate_to):
            ids = _cut(tokenizer, text, request, adds=adds)
        if not 0 < len(ids) <= most:
            return _wrong(request, index, Summary(f"{len(ids)} tokens"), most)
        columns.append(np.asarray(ids, np.uint32))
    return Rendered(
        request.key,
        pack_u32(np.concatenate(columns)),
        counts=pack_u32([len(each) for each in columns]),
    )


def _cut(tokenizer: Any, text: str, request: Render, *, adds: bool) -> list[int]:
    """The ids of a text of which the end, or the beginning, is left out."""
    most, side = request.truncate_to, "left" if request.truncates_left else "right"
    if not tokenizer.is_fast and request.max_first:
        raise slow_tokenizer()
    if not tokenizer.is_fast:
        before: str = tokenizer.truncation_side
        tokenizer.truncation_side = side
        try:
            given = tokenizer(text, add_special_tokens=adds, truncation=True, max_length=most)
        finally:
            tokenizer.truncation_side = before
        ids: list[int] = given["input_ids"]
        return ids
    backend = tokenizer.backend_tokenizer
    encoding = backend.encode(text, add_special_tokens=False)
    num_added = backend.num_special_tokens_to_add(is_pair=False) if adds else 0
    if request.max_first:
        encoding.truncate(request.max_first)
    if most:
        encoding.truncate(max(0, most - num_added), direction=side)
    whole: list[int] = backend.post_process(encoding, add_special_tokens=adds).ids
    return whole[:most] if most else whole


def slow_tokenizer() -> BadRequest:
    """The error for texts of which a tokenizer in Python cannot cut a part."""
    name = "max_tokens_per_query, max_tokens_per_doc"
    return BadRequest(name, Summary("a number"), "0: this model's tokenizer cuts no single texts")


def _wrong(request: Render, index: int, given: str, most: int) -> Rendered:
    fault = BadRequest("input", given, f"1 to {most} tokens").fault
    return Rendered(request.key, fault=fault, index=index)
