"""The client whose requests arrive while others stream, in a separate process.

`python -m slipstream_bench.overlap.arrivals_client`, with a JSON config on standard input. It sends
one long request after the other, reads one token of each, and prints one line of JSON with, for
each, its submission time, the time of its token (time.monotonic) and its prompt length in tokens.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Literal

import msgspec
from msgspec import Struct

from slipstream.client.client import Client
from slipstream_bench.common.load.datasets import as_words

Kind = Literal["prompt", "chat"]


class ArrivalsConfig(Struct, frozen=True):
    """What arrives, and where. size: tokens of the prompt, or messages of the chat."""

    address: str
    kind: Kind
    size: int
    number: int
    pause_s: float  # between a token and the next request


class Arrival(Struct, frozen=True):
    """One completed arrival."""

    asked_s: float
    answered_s: float
    prompt_tokens: int


def main() -> int:
    """Run all arrivals and print them; exit code 0."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ArrivalsConfig)
    arrivals = []
    pause = threading.Event()
    with Client(config.address) as client:
        prompts = [_prompt(config, client.model.path, index) for index in range(config.number)]
        for prompt in prompts:
            pause.wait(config.pause_s)
            asked_s = time.monotonic()
            done = client.generate(prompt, max_tokens=1, temperature=0.0)
            answered_s = time.monotonic()
            arrivals.append(Arrival(asked_s, answered_s, len(done.prompt_token_ids)))
    print(msgspec.json.encode(arrivals).decode(), flush=True)
    return 0


def _prompt(config: ArrivalsConfig, tokenizer: str, index: int) -> Any:
    """A text of about `size` tokens or a chat of `size` messages; it differs by index."""
    if config.kind == "chat":
        roles = ("user", "assistant")
        return [
            {"role": roles[at % 2], "content": as_words(range(index + at, index + at + 20))}
            for at in range(config.size)
        ]
    from tokenizers import Tokenizer

    text = as_words(range(index, index + config.size))
    encoding = Tokenizer.from_file(f"{tokenizer}/tokenizer.json").encode(
        text, add_special_tokens=False
    )
    end = encoding.offsets[config.size - 1][1] if len(encoding) >= config.size else len(text)
    return text[:end]


if __name__ == "__main__":
    raise SystemExit(main())
