"""Requests of a load: random prompts and lengths, or those of a file.

Random prompts are token ids, uniform over the vocabulary except its first hundred, where special
tokens and bytes live. Where text is needed, each id becomes a common word; the resulting number of
tokens is about the same, but known only to the server.

Random lengths are integers, uniform from floor(len * (1 - r)) to ceil(len * (1 + r)), at least 1:
`--range-ratio` has vLLM's meaning, and 0 gives exact lengths. SGLang and LMDeploy draw from q * max
to max instead, which is r = (1 - q) / (1 + q) and len = max * (1 + q) / 2 here.

Files are JSON lines, or one JSON array, of objects of either form:
    {"prompt": "text", "max_tokens": 100}     the prompt may be a list of token ids;
                                              without max_tokens: --output-len
    {"conversations": [{"from": "human", "value": "text"}, ...]}
                                              ShareGPT: the first turn is the prompt
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from slipstream.errors import wrong_option

_FIRST_ID = 100
_COMMON = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line"
)
_WORDS = tuple(_COMMON.split())


class DatasetRequest(Struct, frozen=True, gc=False):
    """One request of a load. prompt: text, or token ids."""

    prompt: str | list[int]
    max_tokens: int

    @property
    def is_text(self) -> bool:
        """Whether the prompt is text."""
        return isinstance(self.prompt, str)

    @property
    def text(self) -> str:
        """The prompt as text; token ids become words."""
        return self.prompt if isinstance(self.prompt, str) else as_words(self.prompt)


class _Turn(Struct):
    value: str


class _Line(Struct):
    prompt: str | list[Annotated[int, Meta(ge=0)]] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    conversations: list[_Turn] | None = None


def random_requests(
    num_requests: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float,
    vocab_size: int,
    random: np.random.Generator,
) -> list[DatasetRequest]:
    """Prompts of random token ids; deterministic for a given generator state."""
    prompt_lens = _lengths(num_requests, input_len, range_ratio, random)
    output_lens = _lengths(num_requests, output_len, range_ratio, random)
    first = min(_FIRST_ID, vocab_size // 2)
    return [
        DatasetRequest(random.integers(first, vocab_size, prompt_len).tolist(), num_tokens)
        for prompt_len, num_tokens in zip(prompt_lens, output_lens, strict=True)
    ]


def requests_from(path: str, num_requests: int | None, output_len: int) -> list[DatasetRequest]:
    """The requests of a file in order, repeated from the start if there are too few.

    num_requests: None takes each once. Raises: BadRequestError naming the invalid line.
    """
    try:
        lines = _lines(Path(path).read_bytes())
    except OSError as error:
        raise wrong_option("dataset", path, f"a file that can be read ({error.strerror})") from None
    except msgspec.ValidationError as error:
        raise wrong_option("dataset", path, f"objects of the documented form ({error})") from None
    except msgspec.DecodeError as error:
        raise wrong_option("dataset", path, f"JSON lines, or one JSON array ({error})") from None
    requests = []
    for number, line in enumerate(lines, 1):
        prompt = line.conversations[0].value if line.conversations else line.prompt
        if not prompt:
            raise wrong_option("dataset", f"entry {number} of {path}", "one with a prompt")
        requests.append(DatasetRequest(prompt, line.max_tokens or output_len))
    if not requests:
        raise wrong_option("dataset", path, "a file with at least one request")
    return list(islice(cycle(requests), num_requests or len(requests)))


def as_words(token_ids: Sequence[int]) -> str:
    """Text with one word per id; the same ids give the same text."""
    return " ".join([_WORDS[token_id % len(_WORDS)] for token_id in token_ids])


def _lines(content: bytes) -> list[_Line]:
    if content.lstrip().startswith(b"["):
        return msgspec.json.decode(content, type=list[_Line])
    return msgspec.json.Decoder(_Line).decode_lines(content)


def _lengths(number: int, length: int, ratio: float, random: np.random.Generator) -> list[int]:
    shortest = max(1, math.floor(length * (1 - ratio)))
    longest = math.ceil(length * (1 + ratio))
    lengths: list[int] = random.integers(shortest, longest + 1, number).tolist()
    return lengths
