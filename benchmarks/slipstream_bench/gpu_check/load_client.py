"""A client process that runs loads on command.

`python -m slipstream_bench.gpu_check.load_client ADDRESS`. It prints `{}` when ready. Then each
line of JSON on standard input is a `ClientLoad`, and is answered by a line of results on standard
output. It ends with its input.

Deltas are read by column, as `Client.stream_many` reads them, so that one process keeps up with the
fastest loads.
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
    """Requests that are submitted all at once; the prompts of two loads share prefixes."""

    num: int
    prompt_len: int
    num_tokens: int
    vocab_size: int
    variant: Variant = "plain"
    seed: int = 0
    pids: dict[str, int] = {}  # processes whose CPU time is measured, by name


def main() -> int:
    """Run loads until standard input ends."""
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
    """Run a load; throughput and CPU time cover the span in which all streams run."""
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
