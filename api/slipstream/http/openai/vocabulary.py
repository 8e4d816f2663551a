"""What single tokens read like, for log-probabilities: the engine sends ids alone.

Owns: the tokenizer's vocabulary, loaded when the first request asks for it. Does not know: streams,
how a whole text is decoded (the worker does that).

Rules:
- A token is its own bytes, whatever stands beside it. Half a character reads as U+FFFD; its name,
  by which tokens are told apart, spells the bytes.
- Where a tokenizer cannot be read here, a token is shown as `token_id:N` and its bytes as unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from slipstream.http.wire import json_text

_logger = logging.getLogger(__name__)
_FILE = "tokenizer.json"


class TokenText(Struct, frozen=True):
    """One token. `raw` is None where it is not known."""

    text: str
    name: str
    raw: bytes | None
    is_added: bool = False  # beside the vocabulary proper, as special tokens are


class Written(Struct, frozen=True, gc=False):
    """One token as JSON. name: its name; first: the same before a value, on a line of its own;
    head: text and bytes, up to where its value follows, as chats show a token. raw: its bytes, as
    far as they are known.
    """

    name: bytes
    first: bytes
    head: bytes
    raw: bytes


class TokenTexts:
    """Texts of tokens by id. Ask `when_loaded`. written: the same as JSON."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer  # a folder, or a hub id of which the worker has the files
        self._known: dict[int, TokenText] = {}
        self.written = _AllWritten(self)
        self._vocabulary: _Vocabulary | None = None
        self._loading: asyncio.Future[None] | None = None

    def when_loaded(self, then: Callable[[], None]) -> None:
        """Call `then` in the running event loop, once texts may be asked for: at once or later."""
        if self._loading is None:
            self._loading = asyncio.get_running_loop().run_in_executor(None, self._load)
        if self._loading.done():
            then()
        else:
            self._loading.add_done_callback(lambda _: then())

    def folder(self) -> Path:
        """Where the tokenizer's files lie. Raises: OSError."""
        return _find(self._tokenizer).parent

    def of(self, token_id: int) -> TokenText:
        """What a token reads like."""
        known = self._known.get(token_id)
        if known is None:
            vocabulary = self._vocabulary
            known = _text(token_id, None if vocabulary is None else vocabulary.raw(token_id))
            if vocabulary is not None and vocabulary.is_added(token_id):
                known = msgspec.structs.replace(known, is_added=True)
            self._known[token_id] = known
        return known

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """What tokens read like together; where no tokenizer could be read, one by one."""
        if self._vocabulary is None:
            return "".join([self.of(token_id).text for token_id in token_ids])
        return self._vocabulary.decode(token_ids, skip_special_tokens)

    def _load(self) -> None:
        try:
            self._vocabulary = _Vocabulary(_find(self._tokenizer).read_bytes())
        except Exception as error:  # whatever is wrong with it, the ids can still be told
            _logger.warning("log-probabilities show token ids, not their texts: %s", error)


class _AllWritten(dict[int, Written]):
    """By token id; written when first asked for. key: names alone, each before a value and behind
    a comma. has_equal_names: of two tokens that were asked for.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._names: set[bytes] = set()
        self.key = _Keys(self)
        self.has_equal_names = False

    def __missing__(self, token_id: int) -> Written:
        token = self._texts.of(token_id)
        name, raw = json_text(token.name), token.raw
        spelled = b"null" if raw is None else b"[%b]" % b",".join([b"%d" % byte for byte in raw])
        head = b'{"token":%b,"bytes":%b,"logprob":' % (json_text(token.text), spelled)
        written = self[token_id] = Written(name, b"\n" + name + b":", head, raw or b"")
        self.has_equal_names |= name in self._names
        self._names.add(name)
        return written


class _Keys(dict[int, bytes]):
    """See `_AllWritten`."""

    def __init__(self, written: _AllWritten) -> None:
        self._written = written

    def __missing__(self, token_id: int) -> bytes:
        key = self[token_id] = b",%b:" % self._written[token_id].name
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
    """What matters here of a tokenizer.json."""

    decoder: Any = None
    added_tokens: tuple[_AddedToken, ...] = ()


class _Vocabulary:
    """Token ids to bytes, by the rules of the tokenizer's decoder."""

    def __init__(self, content: bytes) -> None:
        from tokenizers import Tokenizer  # only who wants log-probabilities pays for it

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
        """Whether a token is beside the vocabulary proper."""
        return token_id in self._added

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Their text."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def raw(self, token_id: int) -> bytes | None:
        """A token's bytes; None for an id that the vocabulary does not have."""
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
    """Byte-level vocabularies spell a byte that is no visible Latin-1 character as the next one of
    those from U+0100 on; all others as themselves.
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

    found = try_to_load_from_cache(tokenizer, _FILE)
    if not isinstance(found, str):
        raise FileNotFoundError(f"no {_FILE} of {tokenizer} on this machine")
    return Path(found)
