"""Texts of single tokens, for log-probabilities: the engine sends token ids only.

The tokenizer's vocabulary is loaded on the first request that needs it. Outputs are detokenized by
the worker, not here.

- A token's text depends on its own bytes only. Bytes of an incomplete character read as U+FFFD; the
  token's name, which distinguishes tokens, spells them out.
- If the tokenizer cannot be loaded, a token is shown as `token_id:N`, its bytes as unknown.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from slipstream.http.response_encoding import json_text
from slipstream_ipc.hub_id import split_revision

_logger = logging.getLogger(__name__)
_FILE = "tokenizer.json"


class TokenText(Struct, frozen=True):
    """One token. raw: its bytes, None if unknown."""

    text: str
    name: str
    raw: bytes | None
    is_added: bool = False  # in addition to the base vocabulary, as special tokens are


class TokenJson(Struct, frozen=True, gc=False):
    """One token as JSON.

    name: its name, a JSON string. chat_head: a chat's entry up to the value of `logprob`. raw: the
    token's bytes, b"" if unknown.
    """

    name: bytes
    chat_head: bytes
    raw: bytes


class TokenTexts:
    """Texts of tokens by id, to be used after `when_loaded`. token_json: the same as JSON."""

    def __init__(self, tokenizer: str | Callable[[], str]) -> None:
        """tokenizer: a folder, or a hub id whose files the worker has downloaded; or a function
        that names it once it is needed.
        """
        self._named = tokenizer
        self._known: dict[int, TokenText] = {}
        self.token_json = _TokenJsonCache(self)
        self._vocabulary: _Vocabulary | None = None
        self._loading: asyncio.Future[None] | None = None

    def when_loaded(self, then: Callable[[], None]) -> None:
        """Call `then` in the running event loop once the vocabulary is loaded: now or later."""
        if self._loading is None:
            self._loading = asyncio.get_running_loop().run_in_executor(None, self._load)
        if self._loading.done():
            then()
        else:
            self._loading.add_done_callback(lambda _: then())

    @property
    def _tokenizer(self) -> str:
        return self._named if isinstance(self._named, str) else self._named()

    def folder(self) -> Path:
        """The folder of the tokenizer's files. Raises: OSError."""
        return _find(self._tokenizer).parent

    def of(self, token_id: int) -> TokenText:
        """The text of a token."""
        known = self._known.get(token_id)
        if known is None:
            vocabulary = self._vocabulary
            known = _text(token_id, None if vocabulary is None else vocabulary.raw(token_id))
            if vocabulary is not None and vocabulary.is_added(token_id):
                known = msgspec.structs.replace(known, is_added=True)
            self._known[token_id] = known
        return known

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode tokens as one text; if no tokenizer could be loaded, one by one."""
        if self._vocabulary is None:
            return "".join([self.of(token_id).text for token_id in token_ids])
        return self._vocabulary.decode(token_ids, skip_special_tokens)

    def _load(self) -> None:
        try:
            self._vocabulary = _Vocabulary(_find(self._tokenizer).read_bytes())
        except Exception as error:  # without a vocabulary, ids are shown instead
            _logger.warning("log-probabilities show token ids, not their texts: %s", error)


class TextsByModel:
    """The texts of the tokens of each served model."""

    def __init__(self, tokenizer_of: Callable[[str], str]) -> None:
        """tokenizer_of: names the tokenizer of a model, by the model's name; see `TokenTexts`."""
        self._tokenizer_of = tokenizer_of
        self._texts: dict[str, TokenTexts] = {}

    def of(self, model: str) -> TokenTexts:
        """The texts of a served model's tokens, by the model's name."""
        if model not in self._texts:
            self._texts[model] = TokenTexts(partial(self._tokenizer_of, model))
        return self._texts[model]


class TokenTextColumns:
    """A text of each token in columns, for C: of token i, `text[starts[i] : starts[i] + sizes[i]]`.
    starts: equal for equal texts. sizes: 0 for a token that was not added yet. lengths: of the
    token itself in characters, -1 where that is not ASCII.
    """

    MOST = 2**22  # ids, by which the columns are bounded

    def __init__(
        self, tokens: Mapping[int, TokenJson], text_of: Callable[[TokenJson], bytes]
    ) -> None:
        """text_of: of a token, which is not empty."""
        self._tokens, self._text_of = tokens, text_of
        self._known: dict[bytes, int] = {}  # where a text begins
        self.text = bytearray()
        self.starts, self.sizes, self.lengths = array("I"), array("I"), array("i")

    def add(self, token_ids: Iterable[int]) -> None:
        """Add tokens, whose ids are below MOST."""
        for token_id in token_ids:
            missing = token_id + 1 - len(self.sizes)
            if missing > 0:
                for column in (self.starts, self.sizes, self.lengths):
                    column.frombytes(bytes(column.itemsize * missing))
            if self.sizes[token_id]:
                continue
            token = self._tokens[token_id]
            text = self._text_of(token)
            self.starts[token_id] = start = self._known.setdefault(text, len(self.text))
            if start == len(self.text):
                self.text += text
            self.sizes[token_id] = len(text)
            self.lengths[token_id] = len(token.raw) if token.raw.isascii() else -1


class _TokenJsonCache(dict[int, TokenJson]):
    """`TokenJson` by token id, filled on access. key: a comma, the name and a colon, by token id.
    name_keys, chat_heads: these and `TokenJson.chat_head` in columns.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self.key = _JsonKeys(self)
        self.name_keys = TokenTextColumns(self, lambda token: b",%b:" % token.name)
        self.chat_heads = TokenTextColumns(self, lambda token: token.chat_head)

    def __missing__(self, token_id: int) -> TokenJson:
        token = self._texts.of(token_id)
        name, raw = json_text(token.name), token.raw
        spelled = b"null" if raw is None else b"[%b]" % b",".join([b"%d" % byte for byte in raw])
        head = b'{"token":%b,"bytes":%b,"logprob":' % (json_text(token.text), spelled)
        encoded = self[token_id] = TokenJson(name, head, raw or b"")
        return encoded


class _JsonKeys(dict[int, bytes]):
    """See `_TokenJsonCache`."""

    def __init__(self, tokens: _TokenJsonCache) -> None:
        self._tokens = tokens

    def __missing__(self, token_id: int) -> bytes:
        key = self[token_id] = b",%b:" % self._tokens[token_id].name
        return key


def _text(token_id: int, raw: bytes | None) -> TokenText:
    if raw is None:
        name = f"token_id:{token_id}"
        return TokenText(name, name, None)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        spelled = "".join([f"\\x{byte:02x}" for byte in raw])
        return TokenText(raw.decode(errors="replace"), f"bytes:{spelled}", raw)
    return TokenText(text, text, raw)


class _AddedToken(Struct, frozen=True):
    id: int
    content: str


class _File(Struct, frozen=True):
    """The fields of tokenizer.json that are used here."""

    decoder: Any = None
    added_tokens: tuple[_AddedToken, ...] = ()


class _Vocabulary:
    """Token ids to bytes, by the rules of the tokenizer's decoder."""

    def __init__(self, content: bytes) -> None:
        from tokenizers import Tokenizer  # imported late: only log-probabilities and echo need it

        file = msgspec.json.decode(content, type=_File)
        self._tokenizer = Tokenizer.from_buffer(content)
        self._added = {token.id: token.content.encode() for token in file.added_tokens}
        steps = _steps(file.decoder)
        kinds = {step.get("type") for step in steps}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_fallback = "ByteFallback" in kinds
        self._spaces = [step["replacement"] for step in steps if step.get("type") == "Metaspace"]
        self._spaces += [
            step["pattern"]["String"]
            for step in steps
            if step.get("type") == "Replace" and step.get("content") == " "
        ]
        self._continuation = next(
            (step["prefix"] for step in steps if step.get("type") == "WordPiece"), ""
        )

    def is_added(self, token_id: int) -> bool:
        """True if a token is in addition to the base vocabulary."""
        return token_id in self._added

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode tokens as one text."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def raw(self, token_id: int) -> bytes | None:
        """A token's bytes; None for an id outside the vocabulary."""
        if token_id in self._added:
            return self._added[token_id]
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return None
        if self._is_byte_level:
            table = _byte_level_table()
            return b"".join([table.get(char) or char.encode() for char in piece])
        is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
        if self._has_byte_fallback and is_byte:
            return bytes([int(piece[3:5], 16)])
        for space in self._spaces:
            piece = piece.replace(space, " ")
        return piece.removeprefix(self._continuation).encode()


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    inner = decoder.get("decoders")
    if isinstance(inner, list):
        return [step for one in inner for step in _steps(one)]
    return [decoder]


@cache
def _byte_level_table() -> dict[str, bytes]:
    """GPT-2's byte-level alphabet: bytes that are visible Latin-1 characters stand for themselves,
    the others for the characters from U+0100 on, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    spelled = {chr(byte): bytes([byte]) for byte in visible}
    return spelled | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(hidden)}


def _find(tokenizer: str) -> Path:
    folder = Path(tokenizer)
    if folder.is_dir():
        return folder / _FILE
    from huggingface_hub import try_to_load_from_cache  # slow to import

    hub_id, revision = split_revision(tokenizer)
    found = try_to_load_from_cache(hub_id, _FILE, revision=revision)
    if not isinstance(found, str):
        raise FileNotFoundError(f"no {_FILE} of {tokenizer} on this machine")
    return Path(found)
