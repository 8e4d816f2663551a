"""Answers that the simulated model plays, from a file of JSON lines.

- A line is {"text": …} or {"token_ids": […]}, optionally with "when": a text. Texts are tokenised
  with the model's tokenizer, in which the spelling of an added token is that token.
- Which answer a prompt gets is a function of the prompt and the seed alone, so a successor plays on
  where its predecessor died: of the lines whose `when` the prompt contains, those whose `when`
  occurs last in it (of several there the longest); without any, the lines that have no `when`. Of
  several such lines a hash of prompt and seed chooses one.
- After an answer comes the model's first end-of-text id, over and over.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from slipstream_ipc.arrays import Int64s, UInt64s
from slipstream_ipc.validation.simulated_model import ALLOWED

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_MAX_PROMPTS = 65_536  # whose answers are remembered; others are found again


class PlayedAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file, with one of `text` and `token_ids`."""

    text: str | None = None
    token_ids: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    when: Annotated[str, Meta(min_length=1)] | None = None


class PlayedAnswers:
    """The answers of a file as ids, and which of them a prompt gets.

    source: the ids of all answers one after the other, each with the end-of-text id behind it.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        """Raises ValueError, with the line, for a file that cannot be played."""
        self.eos_token_ids = eos_token_ids
        self._path = path
        self._tokenizer = tokenizer
        self._lines = _read(path)
        encoded = [self._ids(line) for line in self._lines]
        self.source: Int64s = np.concatenate([np.array(ids, np.int64) for ids in encoded])
        lens = np.array([len(ids) for ids in encoded], np.int64)
        self._last: Int64s = np.cumsum(lens) - 1  # source index of each answer's end
        self._first: Int64s = self._last - lens + 1
        self._found: dict[int, Int64s] = {}  # hash of a prompt: its lines
        self.asks_for_prompts = any(line.when is not None for line in self._lines)

    def check(self, vocab_size: int) -> None:
        """Raises ValueError if an id is outside of the vocabulary."""
        largest = max(int(self.source.max()), *self.eos_token_ids)
        if largest >= vocab_size:
            raise ValueError(f"{self._path} needs id {largest}; the vocabulary has {vocab_size}")

    def missing(self, prompts: UInt64s) -> list[int]:
        """Indices of the prompts, given by their hashes, whose ids `learn` must be given: all of
        them where there is no room beside those that are known.
        """
        if len(self._found) + len(prompts) > _MAX_PROMPTS:
            self._found.clear()
        return [i for i, prompt in enumerate(prompts.tolist()) if prompt not in self._found]

    def learn(self, prompt: int, token_ids: Int64s) -> None:
        """Find the answers of a prompt; its ids matter only if a line has a `when`."""
        text = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
        self._found[prompt] = np.array(self.lines_for(text), np.int64)

    def lines_for(self, prompt: str) -> list[int]:
        """The lines among which a prompt's hash chooses."""
        ends: dict[int, tuple[int, int]] = {}
        for i, line in enumerate(self._lines):
            at = -1 if line.when is None else prompt.rfind(line.when)
            if line.when is not None and at >= 0:
                ends[i] = (at + len(line.when), len(line.when))
        if ends:
            last = max(ends.values())
            return [i for i, end in ends.items() if end == last]
        without = [i for i, line in enumerate(self._lines) if line.when is None]
        return without or list(range(len(self._lines)))

    def positions(self, prompts: UInt64s, chosen: UInt64s, outputs: Int64s) -> Int64s:
        """The source index of each next token, [S]: of the answer that `chosen` picks."""
        lines = np.zeros(len(prompts), np.int64)
        for i, (prompt, pick) in enumerate(zip(prompts.tolist(), chosen.tolist(), strict=True)):
            found = self._found[prompt]
            lines[i] = found[pick % len(found)]
        positions: Int64s = np.minimum(self._first[lines] + outputs, self._last[lines])
        return positions

    def _ids(self, line: PlayedAnswer) -> list[int]:
        if line.token_ids is not None:
            ids: list[int] = list(line.token_ids)
        else:
            ids = self._tokenizer.encode(line.text or "", add_special_tokens=False).ids
        return [*ids, self.eos_token_ids[0]]


def load_answers(path: Path, folder: Path, tokenizer: Tokenizer) -> PlayedAnswers:
    """Read the answers; the tokenizer is that of `folder`. Raises ValueError."""
    eos = _eos_token_ids(folder, tokenizer)
    if not eos:
        raise ValueError(
            f"option 'answers' needs the model's end-of-text token, which neither "
            f"generation_config.json nor tokenizer_config.json in {folder} names"
        )
    return PlayedAnswers(path, tokenizer, eos)


def _read(path: Path) -> list[PlayedAnswer]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(
            f"option 'answers' is '{path}' ({error.strerror}); allowed: {ALLOWED['answers']}"
        ) from error
    answers = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            answer = msgspec.json.decode(line, type=PlayedAnswer)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if (answer.text is None) == (answer.token_ids is None):
            raise ValueError(f"{path}, line {number}: either text or token_ids is to be given")
        answers.append(answer)
    if not answers:
        raise ValueError(f"option 'answers' is '{path}', which holds no answers")
    return answers


def _eos_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The end-of-text ids from the generation settings, else from the tokenizer's."""
    given = _json(folder / "generation_config.json").get("eos_token_id")
    if isinstance(given, int):
        return (given,)
    if isinstance(given, Sequence) and given:
        return tuple(int(token_id) for token_id in given)
    token = _json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    token_id = tokenizer.token_to_id(token) if isinstance(token, str) else None
    return () if token_id is None else (token_id,)


def _json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}
