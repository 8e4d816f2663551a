"""The tokens by which a tokenizer and its chat template say that an answer ends.

They end answers beside those that the model's configurations name: fine-tuned models often change
the tokenizer's end-of-sequence token alone. A token that nobody names is no end, whatever it is
called.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from slipstream_ipc.messages import ChatMessage
from slipstream_worker.tokenizer.template_dialect import TemplateDialect

logger = logging.getLogger(__name__)

_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_NAMES = ("eos_token", "eot_token")  # of sequence, of turn
# in which the former are kept where they are no attributes of transformers' own
_MAPS = ("extra_special_tokens", "model_specific_special_tokens")
_CONTENT = "probe_content"


def end_token_ids(
    tokenizer: Any, dialect: TemplateDialect, delimiters: Collection[str] = ()
) -> tuple[int, ...]:
    """The ids that end an answer: the tokenizer's end-of-sequence token, those that its files name
    as such or as the end of a turn, and the special tokens that its template writes behind an
    assistant's last turn. delimiters: of the answers' format, which says itself what they end; the
    `<|end|>` of harmony is a tokenizer's end of sequence and stands between messages of one answer.
    """
    found: list[int] = []
    if tokenizer.eos_token_id is not None and tokenizer.eos_token not in delimiters:
        found.append(tokenizer.eos_token_id)
    known = tokenizer.get_added_vocab()
    for text in (*_named(tokenizer), *_behind_a_turn(tokenizer, dialect, known)):
        if text in delimiters:
            continue
        token_id = known.get(text, tokenizer.convert_tokens_to_ids(text))
        # an unknown text is the unknown token
        if token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == text:
            found.append(token_id)
    return tuple(dict.fromkeys(found))


def _named(tokenizer: Any) -> Iterator[str]:
    """The spellings that the tokenizer's attributes and its files name."""
    tables = [dict(tokenizer.special_tokens_map)]
    folder = Path(str(tokenizer.name_or_path))
    for file in _FILES if folder.name else ():
        try:
            table = json.loads((folder / file).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(table, dict):
            tables += [table, *(table[each] for each in _MAPS if isinstance(table.get(each), dict))]
    for table in tables:
        for name in _NAMES:
            token = table.get(name)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                yield token


def _behind_a_turn(
    tokenizer: Any,
    dialect: TemplateDialect,
    added_tokens: Collection[str],
) -> Iterator[str]:
    if not tokenizer.chat_template:
        return
    turns = dialect.turns([ChatMessage("user", "a"), ChatMessage("assistant", _CONTENT)])
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:  # a template raises whatever it likes
        logger.debug("the end of a turn is unknown: %s", type(error).__name__)
        return
    _, found, tail = text.rpartition(_CONTENT)
    if not found:
        return
    longest_first = sorted(filter(None, added_tokens), key=len, reverse=True)
    while tail := tail.lstrip():
        token = next((each for each in longest_first if tail.startswith(each)), None)
        if token is None:
            return
        yield token
        tail = tail[len(token) :]
