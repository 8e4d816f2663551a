"""A client's process that runs one load after another, as it is told.

`python -m slipstream_bench.gpu_check.load_client ADDRESS`. It says `{}` when it is ready. Then a
line of JSON on standard input is a `ClientLoad`, and one on standard output says what came of it.
It ends with its input.

Deltas are read by column, as `Client.stream_many` reads them: one process can then read what the
fastest of the loads brings.
"""

from __future__ import annotations

import sys

import msgspec
from msgspec import Struct

from slipstream.errors import SlipstreamError
from slipstream_bench.common.live_streams import CLIENT, LiveStreams
from slipstream_bench.common.variants import Variant, params_of
from slipstream_bench.gpu_check.drive import random_prompts

_WITHIN_S = 60.0


class ClientLoad(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that are asked all at once; the prompts of two loads begin alike."""

    num: int
    prompt_len: int
    num_tokens: int
    vocab_size: int
    variant: Variant = "plain"
    seed: int = 0
    pids: dict[str, int] = {}  # whose CPU time is wanted, by name


def main() -> int:
    """Run loads until there are no more."""
    address = sys.argv[1]
    decoder = msgspec.json.Decoder(ClientLoad)
    _say({})
    for line in sys.stdin.buffer:
        try:
            said = _run(address, decoder.decode(line))
        except SlipstreamError as error:
            said = {"error": str(error)}
        _say(said)
    return 0


def _say(what: dict[str, object]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


def _run(address: str, load: ClientLoad) -> dict[str, object]:
    """Throughput is that of the span in which all streams run; so is the CPU time."""
    prompts = random_prompts(load.num, load.prompt_len, load.vocab_size, load.seed)
    params = params_of(load.variant, load.num_tokens)
    with LiveStreams(address, [(prompt, params) for prompt in prompts]) as live:
        live.wait_until_running(0.0)
        window = live.window(_WITHIN_S, load.pids)
        live.wait_until_over(_WITHIN_S)
        output_tokens = sum(tally.num_tokens for tally in live.tallies)
    cpu_us = {
        f"{name}_cpu_us_per_token": round(window.cpu_us_per_token(name), 3)
        for name in (*load.pids, CLIENT)
        if window.num_tokens
    }
    return {
        "output_tokens": output_tokens,
        "window_s": round(window.end_s - window.begin_s, 4),
        "window_tokens": window.num_tokens,
        "tokens_per_s": round(window.tokens_per_s, 1),
        "tokens_per_delta": round(window.coalescing, 3),
        **cpu_us,
    }


if __name__ == "__main__":
    raise SystemExit(main())
