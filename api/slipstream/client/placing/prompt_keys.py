"""Says which prompts probably share cached blocks, from their text and without a tokenizer.

A prompt has a key that stays the same over the turns of its conversation, and a chain of hashes,
one for each beginning of the prompt, by which its longest known beginning is found. Pure.

- Keys are the same in every process, so that routers that never talk place a conversation alike.
  Chains are compared within one process alone.
- Lengths are in tokens, of which a text is assumed to have one for every four bytes of UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import numpy as np

from slipstream.packed_prompts import messages_of, prompt_text_of
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.messages import ChatMessage, Submit, TemplateOptions
from slipstream_ipc.validation.media import with_digests
from slipstream_ipc.validation.request_spec import root_digest

BYTES_PER_TOKEN = 4
CHUNK_BYTES = 512  # between two hashes of a chain
_NUM_CHUNKS = 64  # after these, chunks are longer
_LONG_CHUNK_BYTES = 8 * CHUNK_BYTES
_MAX_CHAIN = 512
KEY_TOKENS = 512  # of the first key of a text, whose turns are not known
_KEY_BYTES = KEY_TOKENS * BYTES_PER_TOKEN
_NO_OPTIONS = TemplateOptions()
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True, eq=False)
class PromptKey:
    """The features of a prompt by which it is placed.

    first: hash of the turns up to the first one of the user, or of what the request says instead.
    second: of those up to the user's second turn; None if there is no such turn.
    num_continued: how many of the two keys the conversation has had in an earlier request; None for
    texts, whose turns are not known.
    prompt_len: tokens. prior_len: those up to the last answer, 0 without one.
    chain: int64 [n], hashes of ever longer beginnings. lengths: int64 [n], their lengths in tokens.
    """

    first: int
    second: int | None
    num_continued: int | None
    prompt_len: int
    prior_len: int
    chain: Int64s
    lengths: Int64s


def prompt_key(submit: Submit, model: str, prompt_cache_key: str = "") -> PromptKey:
    """The key of a request to the served model `model`; all of its answers share it.

    prompt_cache_key: the user's own name for what shares a prompt; empty for none.
    """
    # of no tenant: whether tenants share prefixes is a setting of the replicas
    root = root_digest(model, submit)
    if messages := messages_of(submit):
        if submit.media:
            messages = tuple(with_digests(message, submit.media) for message in messages)
        return chat_key(messages, root, submit.template, prompt_cache_key)
    if (text := prompt_text_of(submit)) is not None:
        return text_key(text.encode("utf-8", "surrogatepass"), root, prompt_cache_key)
    if submit.media:  # what follows the first one is told apart by its replica
        root += submit.media[0].digest
    return text_key(submit.token_ids, root, prompt_cache_key)


def chat_key(
    messages: Sequence[ChatMessage],
    root: bytes,
    template: TemplateOptions = _NO_OPTIONS,
    prompt_cache_key: str = "",
) -> PromptKey:
    """The key of a chat. root: see `root_digest`."""
    parts = [template.tools.encode("utf-8", "surrogatepass")]
    end = len(parts[0])
    user_ends: list[int] = []
    num_continued = prior_end = 0
    last = len(messages) - 1
    for index, message in enumerate(messages):
        part = _encode(message)
        parts.append(part)
        end += len(part)
        if message.role == "user":
            user_ends.append(end)
        elif message.role == "assistant" and index < last:
            prior_end = end
            num_continued = min(2, len(user_ends))
    body = b"".join(parts)
    ends = user_ends[:2] or [end]
    seed = _encode((root, template.kwargs))
    first, second = _keys(seed, body, ends, prompt_cache_key)
    chain, lengths = _chain(seed, body)
    prompt_len, prior_len = len(body) // BYTES_PER_TOKEN, prior_end // BYTES_PER_TOKEN
    return PromptKey(first, second, num_continued, prompt_len, prior_len, chain, lengths)


def text_key(body: bytes, root: bytes, prompt_cache_key: str = "") -> PromptKey:
    """The key of a prompt without turns. body: UTF-8 of a text, or token ids, a u32 column."""
    seed = _encode((root, ""))
    ends = (_KEY_BYTES, 2 * _KEY_BYTES) if len(body) >= 2 * _KEY_BYTES else (_KEY_BYTES,)
    first, second = _keys(seed, body, ends, prompt_cache_key)
    chain, lengths = _chain(seed, body)
    return PromptKey(first, second, None, len(body) // BYTES_PER_TOKEN, 0, chain, lengths)


def _keys(
    seed: bytes, body: bytes, ends: Sequence[int], prompt_cache_key: str
) -> tuple[int, int | None]:
    """The first key and the second one, which `body` up to the `ends` has."""
    hashed = blake2b(seed, digest_size=8)
    if prompt_cache_key:
        hashed.update(_encode(prompt_cache_key))
        first = hashed.digest()
        hashed.update(body[: ends[0]])
    else:
        hashed.update(body[: ends[0]])
        first = hashed.digest()
    if len(ends) == 1:
        return int.from_bytes(first, "little"), None
    hashed.update(body[ends[0] : ends[1]])
    return int.from_bytes(first, "little"), int.from_bytes(hashed.digest(), "little")


def _chain(seed: bytes, body: bytes) -> tuple[Int64s, Int64s]:
    ends = _ENDS[: int(np.searchsorted(_ENDS, len(body), side="right"))]
    found: list[int] = []
    so_far = hash(seed)
    begin = 0
    for end in ends.tolist():
        so_far = hash((so_far, body[begin:end]))
        found.append(so_far)
        begin = end
    return np.array(found, np.int64), ends // BYTES_PER_TOKEN


def _chunk_ends() -> Int64s:
    sizes = np.full(_MAX_CHAIN, CHUNK_BYTES, np.int64)
    sizes[_NUM_CHUNKS:] = _LONG_CHUNK_BYTES
    return np.cumsum(sizes)


_ENDS = _chunk_ends()
