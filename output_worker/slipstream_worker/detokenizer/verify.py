"""Tests a compiled table: compares streams over it with the tokenizer's own decode."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from slipstream_worker.detokenizer.factory import DetokenizerFactory, TableDetokenizerFactory
from slipstream_worker.detokenizer.reference import DecodeReference
from slipstream_worker.detokenizer.table import TokenTable

__all__ = ["DecodeOracle", "Trial", "find_mismatch", "mismatch_of", "random_trials"]

_CHARACTERS = "é▁你\ufffd😀 a"
_LENGTHS = (1, 2, 5, 17, 64)
_NUM_BEYOND_VOCABULARY = 4

Trial = tuple[list[int], list[int], bool]  # prompt, output, skip_special_tokens


class DecodeOracle(Protocol):
    """The text that a stream has to produce."""

    def continuation(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], skip_special_tokens: bool
    ) -> str:
        """The text that these output ids add to the prompt's text."""


def find_mismatch(
    reference: DecodeOracle | Tokenizer, table: TokenTable, *, num_trials: int = 100, seed: int = 0
) -> str | None:
    """The first mismatch between `table` and the reference (or the tokenizer's decode); None if all
    trials agree.

    Tries all tokens in the order of their ids; each single-byte token as part of a character; each
    token alone if the table has rules for the first or the last token; and for each kind of ids
    `num_trials` random prompts and outputs.
    """
    if isinstance(reference, Tokenizer):
        reference = DecodeReference(reference)
    factory = TableDetokenizerFactory(table)
    all_ids = list(range(table.vocab_size + _NUM_BEYOND_VOCABULARY))
    trials: list[Trial] = [([], all_ids, skip) for skip in (False, True)]
    trials += _byte_trials(table)
    if table.first_pieces or table.last_pieces or table.num_stripped:
        trials += [([], [token_id], False) for token_id in all_ids]
    trials += random_trials(table, num_trials, seed)
    for trial in trials:
        mismatch = mismatch_of(reference, factory, trial)
        if mismatch is not None:
            return mismatch
    return None


def random_trials(table: TokenTable, num_trials: int, seed: int) -> Iterable[Trial]:
    """Random prompts and outputs: of any ids; of pieces that are not valid UTF-8 alone; of byte
    tokens; of special ids; of bytes that spell whole characters.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible, no secret
    ids = range(table.vocab_size + _NUM_BEYOND_VOCABULARY)
    broken = [i for i, piece in enumerate(table.pieces) if piece and not _is_utf8(piece)]
    pools = [[[i] for i in pool] for pool in (ids, broken, table.byte_ids, table.special)]
    pools.append(_spelled_characters(table))
    for skip_special_tokens in (False, True):
        for pool in pools:
            for _ in range(num_trials if pool else 0):
                length = rng.choice(_LENGTHS)
                sequence: list[int] = []
                while len(sequence) < length:
                    sequence += rng.choice(pool) if rng.random() < 0.5 else [rng.choice(ids)]
                cut = rng.choice((0, 1, rng.randint(0, len(sequence))))
                yield sequence[:cut], sequence[cut:], skip_special_tokens


def mismatch_of(reference: DecodeOracle, factory: DetokenizerFactory, trial: Trial) -> str | None:
    """The difference between the stream of `trial` and the expected text, in one sentence; None if
    they are equal.
    """
    prompt_ids, output_ids, skip_special_tokens = trial
    expected = reference.continuation(prompt_ids, output_ids, skip_special_tokens)
    stepped = factory.create(prompt_ids, skip_special_tokens)
    batched = factory.create(prompt_ids, skip_special_tokens)
    texts = (
        "".join([stepped.step(token_id) for token_id in output_ids]) + stepped.flush(),
        batched.step_many(output_ids) + batched.flush(),
    )
    for text in texts:
        if text != expected:
            return (
                f"prompt {prompt_ids[-8:]} and output {output_ids[:64]} "
                f"(skip_special_tokens={skip_special_tokens}) decode to {expected[:200]!r}, "
                f"the stream makes {text[:200]!r} of them"
            )
    return None


def _byte_trials(table: TokenTable) -> Iterable[Trial]:
    """Each token of one byte, before bytes that complete it to a character and after one it may
    complete.

    Every first byte is followed by one, two or three times 0x80, 0x90 or 0xA0; every later byte
    follows 0xC2. What the vocabulary cannot spell is left out.
    """
    id_of = _ids_of_bytes(table)
    later = [id_of[byte] for byte in (b"\x80", b"\x90", b"\xa0") if byte in id_of]
    first = [id_of[byte] for byte in (b"\xc2",) if byte in id_of]
    for token_id in table.byte_ids or range(table.vocab_size):
        if len(table.pieces[token_id] or b"") == 1:
            for sequence in [[token_id] + [i] * length for i in later for length in (1, 2, 3)]:
                yield [], sequence, False
            for sequence in [[i, token_id] for i in first]:
                yield [], sequence, False


def _spelled_characters(table: TokenTable) -> list[list[int]]:
    """Some characters spelled by one-byte tokens, as far as the vocabulary has them."""
    id_of = _ids_of_bytes(table)
    spelled = [[id_of.get(bytes([byte])) for byte in char.encode()] for char in _CHARACTERS]
    return [[i for i in char if i is not None] for char in spelled if None not in char]


def _ids_of_bytes(table: TokenTable) -> dict[bytes, int]:
    ids = table.byte_ids or range(table.vocab_size)
    pieces = ((token_id, table.pieces[token_id] or b"") for token_id in ids)
    return {piece: token_id for token_id, piece in pieces if len(piece) == 1}


def _is_utf8(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
