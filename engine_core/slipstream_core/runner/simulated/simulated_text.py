"""The next token for each history, in the simulated model.

Hashes histories and chooses the next token from the hash. Everything is pure: `expected_tokens`
returns what any request must get, without a cache.

- The hash of a history is h[p] = h[p - 1] + mix(token[p], p) modulo 2**64, so a chunk is a
  cumulative sum.
- `playback` reads a text from a position chosen by hash(seed, h at the prompt's end). The output is
  readable, and the same as long as the prompt in the cache is intact.
- `chain` chooses each token by hash(seed, h here, h at an earlier position picked by h here), so
  every token of the history, and every block that holds it, affects all that follow.
- `answers` plays the answers of a file, see `played_answers`, special ids included. What a grammar
  forbids of them is replaced.
- Other sampled ids are ordinary ones, never special, unless a grammar allows them. Temperature 0
  ignores the seed, which counts as 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from slipstream_core.runner.simulated.played_answers import PlayedAnswers, load_answers
from slipstream_ipc.arrays import Float32s, Int64s, UInt32s, UInt64s
from slipstream_ipc.validation.simulated_model import ALLOWED, SimulatedOptions

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_DEFAULT_VOCAB_SIZE = 32_000
_FEW_MASKED = 4  # ids
_CORPUS_CHARS = 200_000  # enough for streams to differ; encoded in a fraction of a second
_SYNTHETIC_CORPUS_LEN = 65_536

_NO_IDS: Int64s = np.empty(0, np.int64)


class SimulatedText:
    """Chooses tokens; the module docstring describes the modes.

    answers: what is played, if anything is.
    """

    def __init__(self, options: SimulatedOptions) -> None:
        self._chain = options.mode == "chain"
        self.answers: PlayedAnswers | None = None
        if options.tokenizer is None:
            self.vocab_size = options.vocab_size or _DEFAULT_VOCAB_SIZE
            self._ordinary: Int64s = np.arange(self.vocab_size)
            positions = np.arange(_SYNTHETIC_CORPUS_LEN, dtype=np.uint64)
            corpus = (_scramble(positions) % np.uint64(self.vocab_size)).astype(np.int64)
        else:
            path = Path(options.tokenizer)
            tokenizer = _open_tokenizer(path)
            with_corpus = not self._chain and options.answers is None
            self._ordinary, corpus, needed = _ids_of(tokenizer, path, with_corpus=with_corpus)
            self.vocab_size = options.vocab_size or needed
            if self.vocab_size < needed:
                raise ValueError(
                    f"option 'vocab_size' is {self.vocab_size}, but {options.tokenizer} has "
                    f"ids up to {needed - 1}: give at least {needed}, or leave it out"
                )
            if options.answers is not None:
                folder = path if path.is_dir() else path.parent
                self.answers = load_answers(Path(options.answers), folder, tokenizer)
                self.answers.check(self.vocab_size)
                corpus = self.answers.source
        self._source = self._ordinary if self._chain else corpus

    def mix(self, token_ids: Int64s, positions: Int64s) -> UInt64s:
        """The number that each token adds to the hash of its history, uint64 [T]."""
        return _scramble(_bits(token_ids) * _TOKEN_FACTOR + _bits(positions) * _POSITION_FACTOR)

    def probe_position(self, here: UInt64s, kv_lens: Int64s) -> Int64s:
        """An earlier position to read as well, [S]; any block may be hit."""
        return (_scramble(here) % _bits(kv_lens)).astype(np.int64)

    def start(
        self, *, seeds: Int64s, outputs: Int64s, here: UInt64s, prompt: UInt64s, probe: UInt64s
    ) -> tuple[Int64s, UInt64s]:
        """The source index of each next token and the hash that chose it, both [S].

        `outputs` is the number of output tokens so far; `here`, `prompt` and `probe` are the
        hashes at the last position, at the prompt's last one and at probe_position(). `answers`
        has learned the prompts.
        """
        seeded = _scramble(_bits(seeds) + _SEED_OFFSET)
        length = np.uint64(len(self._source))
        if self._chain:
            chosen = _scramble(here ^ seeded) + _scramble(probe ^ seeded)
            return (chosen % length).astype(np.int64), chosen
        chosen = _scramble(prompt ^ seeded)
        if self.answers is not None:
            return self.answers.positions(prompt, chosen, outputs), here ^ seeded
        return ((chosen % length).astype(np.int64) + outputs), here ^ seeded

    def pick(self, start: Int64s, masked_rows: Int64s, masked_ids: Int64s) -> Int64s:
        """The first unmasked id at or after `start`, [S]; the source wraps around."""
        positions = start.copy()
        for _ in range(len(self._source)):
            ids = self._source[positions % len(self._source)]
            hit = masked_rows[ids[masked_rows] == masked_ids]
            if not len(hit):
                return ids
            positions[hit] += 1
        raise ValueError("every id that could be sampled is masked")

    def pick_allowed(self, start: Int64s, masks: npt.NDArray[np.int32]) -> Int64s:
        """One of the ids that each row's mask allows, [G]: that of the answer that is played, where
        it is allowed; else, where hardly any id is masked, that of `pick`; else one by hash.

        `masks` is as in `Runner.sample`. Special ids are included, as a grammar ends with one.
        """
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        picked = np.zeros(len(start), np.int64)
        for i, hashed in enumerate(_scramble(_bits(start)).tolist()):
            allowed = np.flatnonzero(bits[i, : self.vocab_size])
            played = self._source[start[i] % len(self._source)]
            if self.answers is not None and bits[i, played]:
                picked[i] = played
            elif len(allowed) >= self.vocab_size - _FEW_MASKED:
                masked = np.flatnonzero(bits[i, : self.vocab_size] == 0)
                picked[i] = self.pick(start[i : i + 1], np.zeros_like(masked), masked)[0]
            else:
                picked[i] = allowed[hashed % len(allowed)]
        return picked

    def logprobs(self, chosen: UInt64s, ids: Int64s, k: int) -> tuple[Float32s, UInt32s]:
        """Made-up values and ids, both [S, 1 + k]; the sampled id is the most likely of the k."""
        ranks = np.arange(max(k, 1), dtype=np.uint64)
        noise = _scramble(chosen[:, None] + ranks * _TOKEN_FACTOR) >> np.uint64(11)
        share = 0.1 + 0.2 * noise / 2.0**53
        share[:, 0] *= 2  # the sum over all ids stays below 1
        values = np.cumsum(np.log(share), axis=1)
        positions = np.searchsorted(self._ordinary, ids)[:, None] + ranks.astype(np.int64)
        likeliest = self._ordinary[positions % len(self._ordinary)]
        likeliest[:, 0] = ids  # which may be special
        columns = np.concatenate([[0], np.arange(k)])
        return values[:, columns].astype(np.float32), likeliest[:, columns].astype(np.uint32)

    def listed_logprobs(self, own: float, token_id: int, listed: Int64s) -> Float32s:
        """Made-up values of the listed ids; the sampled id has the value `own`."""
        values = own - 1 - listed.astype(np.float32) / self.vocab_size
        return np.where(listed == token_id, own, values).astype(np.float32)


def drawn_lengths(hashes: UInt64s, *, mean: float) -> Int64s:
    """Whole numbers around `mean` >= 1, int64 [S]: the two next to it, chosen by the hashes."""
    least, share = divmod(mean, 1)
    uniform = (_scramble(hashes + _LENGTH_OFFSET) >> np.uint64(11)) / 2.0**53
    return int(least) + (uniform < share).astype(np.int64)


def _ids_of(tokenizer: Tokenizer, path: Path, *, with_corpus: bool) -> tuple[Int64s, Int64s, int]:
    """A tokenizer's ordinary ids ascending, the ids of a text, and the number of ids.

    Encoding the text takes most of the time, and is left out without `with_corpus`.
    """
    added = tokenizer.get_added_tokens_decoder()
    special = [token_id for token_id, token in added.items() if token.special]
    vocab = np.array(sorted(tokenizer.get_vocab(with_added_tokens=True).values()), np.int64)
    ordinary = np.unique(vocab[~np.isin(vocab, special)])
    num_ids = int(vocab[-1]) + 1
    if not with_corpus:
        return ordinary, _NO_IDS, num_ids
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))[:_CORPUS_CHARS]
    corpus = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
    corpus = corpus[~np.isin(corpus, special)]
    if not len(corpus):
        raise ValueError(f"option 'tokenizer' is '{path}', which encodes English text to nothing")
    return ordinary, corpus, num_ids


def _open_tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"option 'tokenizer' is '{path}'; allowed: {ALLOWED['tokenizer']}")
    from tokenizers import Tokenizer  # imported here, as most simulations have no tokenizer

    return Tokenizer.from_file(str(file))


# Odd factors spread small integers over 64 bits; the shifts and factors of _scramble are those
# of the splitmix64 generator's output function (Steele, Lea and Flood, 2014).
_TOKEN_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_POSITION_FACTOR = np.uint64(0xD1B54A32D192ED03)
_SEED_OFFSET = np.uint64(0x632BE59BD9B4E019)
_LENGTH_OFFSET = np.uint64(0xA0761D6478BD642F)


def _scramble(values: UInt64s) -> UInt64s:
    """A bijection of 64 bits in which every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _bits(values: Int64s) -> UInt64s:
    return values.astype(np.uint64)
