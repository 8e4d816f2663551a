"""The reference for all detokenisers: `Tokenizer.decode` under the continuation rule of `factory`.

The self-test, the tests and the benchmark compare against it. It is written to be simple, and
decodes everything anew. Only for a run of byte tokens that is not valid UTF-8 is the decoder given
other tokens than the sequence has: "U+FFFD" for each byte that belongs to no character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from os.path import commonprefix
from typing import Any

from tokenizers import Tokenizer

__all__ = ["DecodeReference", "byte_of_token", "decoder_steps"]

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f+][0-9A-Fa-f])>")  # digits as the decoder reads them
# Any UTF-8 character, by byte ranges; a first byte is never a later byte of another character.
_CHARACTER = re.compile(
    rb"[\x00-\x7f]"
    rb"|[\xc2-\xdf][\x80-\xbf]"
    rb"|\xe0[\xa0-\xbf][\x80-\xbf]"
    rb"|[\xe1-\xec\xee\xef][\x80-\xbf]{2}"
    rb"|\xed[\x80-\x9f][\x80-\xbf]"
    rb"|\xf0[\x90-\xbf][\x80-\xbf]{2}"
    rb"|[\xf1-\xf3][\x80-\xbf]{3}"
    rb"|\xf4[\x80-\x8f][\x80-\xbf]{2}"
)


def decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The decoder section of tokenizer.json as a list of steps; empty if there is none."""
    if tokenizer.decoder is None:
        return []
    # The pickled state of a decoder is its section.
    return _flat(json.loads(tokenizer.decoder.__getstate__()))


def byte_of_token(token: str) -> int | None:
    """The byte that ByteFallback makes of this token; None if it leaves the token alone."""
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None


class DecodeReference:
    """One tokenizer's decode, and its continuation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._has_runs = any(step["type"] == "ByteFallback" for step in decoder_steps(tokenizer))
        # decode skips by a token's text, not by its id.
        self._special = {
            added.content
            for added in tokenizer.get_added_tokens_decoder().values()
            if added.special
        }

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of a sequence: that of a stream without a prompt."""
        return self.continuation([], token_ids, skip_special_tokens)

    def continuation(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], skip_special_tokens: bool
    ) -> str:
        """The text of a stream with these `output_ids` after `prompt_ids`."""
        ids = [*prompt_ids, *output_ids]
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        before = self._tokenizer.decode(list(prompt_ids), skip_special_tokens=skip_special_tokens)
        if self._has_runs:
            tokens = self._tokens(ids, skip_special_tokens)
            num_before = len(self._tokens(prompt_ids, skip_special_tokens))
            characters = _characters(tokens)
            has_broken = _mark_broken(tokens, characters)
            # A character begun by the prompt belongs to the stream, U+FFFD to the prompt.
            for start, end, char in characters:
                if start < num_before < end:
                    num_before = end if char == _REPLACEMENT else start
            before = self._decode_tokens(tokens[:num_before])
            if has_broken:
                text = self._decode_tokens(tokens)
        shared = commonprefix((before, text))  # noqa: RUF071 - it is characters that are meant
        return text[len(shared) :]

    def _tokens(self, token_ids: Sequence[int], skip_special_tokens: bool) -> list[str]:
        tokens = [self._tokenizer.id_to_token(token_id) for token_id in token_ids]
        skipped = self._special if skip_special_tokens else set()
        return [token for token in tokens if token is not None and token not in skipped]

    def _decode_tokens(self, tokens: list[str]) -> str:
        decoder = self._tokenizer.decoder
        assert decoder is not None
        return decoder.decode(tokens) if tokens else ""


def _flat(section: dict[str, Any]) -> list[dict[str, Any]]:
    if section["type"] != "Sequence":
        return [section]
    return [step for part in section["decoders"] for step in _flat(part)]


def _characters(tokens: list[str]) -> list[tuple[int, int, str]]:
    """(first token, token after the last, character) for each character that byte tokens spell."""
    found = []
    start = 0
    for is_byte, group in groupby(tokens, lambda token: byte_of_token(token) is not None):
        run = list(group)
        if is_byte:
            data = bytes([byte_of_token(token) or 0 for token in run])
            found += [
                (start + match.start(), start + match.end(), match[0].decode())
                for match in _CHARACTER.finditer(data)
            ]
        start += len(run)
    return found


def _mark_broken(tokens: list[str], characters: list[tuple[int, int, str]]) -> bool:
    """Replace byte tokens outside `characters` by U+FFFD, in place; returns whether any were."""
    whole = {place for start, end, _ in characters for place in range(start, end)}
    broken = [
        place
        for place, token in enumerate(tokens)
        if place not in whole and byte_of_token(token) is not None
    ]
    for place in broken:
        tokens[place] = _REPLACEMENT
    return bool(broken)
