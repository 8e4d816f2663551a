"""The cost of grammars: a step's time with and without them, and the longest gap of other streams
while one compiles.

    python -m slipstream_bench.studies.grammar_cost [MODEL ...]

By default it runs a simulated device with 10 ms steps (masks are computed while time passes, as on
a device that is not the host) and the demo model on this CPU. `forbidding little` is a grammar that
any text matches, so that both runs compute the same number of tokens.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time

import slipstream
from slipstream.demo_model import MODEL_PATH
from slipstream_ipc.messages import StructuredOutputs

_SIMULATED = f"simulated:step_ms=10,prefill_us=0,tokenizer={MODEL_PATH}"
_END = 1
_WORDS = StructuredOutputs(regex="([a-z]{1,12} )*#")  # practically endless
_OBJECT = StructuredOutputs(json={"type": "array", "items": {"type": "string"}, "minItems": 200})
_NUM_TOKENS = 200
_LARGE = {
    "type": "object",
    "properties": {
        f"f{i}": {"type": "string", "pattern": f"^(a|b|c){{3,{i + 5}}}$"} for i in range(3000)
    },
    "required": [f"f{i}" for i in range(3000)],  # optional ones would exceed the library's limits
}


def main(models: list[str]) -> None:
    for model in models or [_SIMULATED, str(MODEL_PATH)]:
        _say(f"\n{model}")
        with (
            slipstream.Stack(model, spare_core=False, spare_worker=False) as stack,
            stack.client() as client,
        ):
            _run(client, 8, _WORDS)  # loads the vocabulary
            for num in (1, 16, 64):
                plain = statistics.median(_run(client, num, None) for _ in range(3))
                for name, grammar in (("regex", _WORDS), ("json", _OBJECT)):
                    with_it = statistics.median(_run(client, num, grammar) for _ in range(3))
                    half = statistics.median(_run(client, num, grammar, every=2) for _ in range(3))
                    _say(
                        f"  {num:3} streams: a step takes {1e3 * plain:6.2f} ms; {name:5} on all "
                        f"{1e3 * with_it:6.2f} ms, on half of them {1e3 * half:6.2f} ms"
                    )
            _say(f"  longest gap of a stream, alone: {1e3 * _longest_gap(client, None):.0f} ms")
            large = StructuredOutputs(json=_LARGE)
            gap = _longest_gap(client, large)
            _say(f"  … while a grammar of 3,000 patterns compiles: {1e3 * gap:.0f} ms")


def _run(
    client: slipstream.Client, num: int, grammar: StructuredOutputs | None, every: int = 1
) -> float:
    """Seconds per token of each of `num` simultaneous streams, of which every nth has a grammar."""
    begin = time.perf_counter()
    streams = [
        client.stream(
            f"Chapter {i}",
            max_tokens=_NUM_TOKENS,
            temperature=1.0,
            seed=i,
            ignore_eos=True,
            stop_token_ids=[_END] if grammar is not None and i % every == 0 else [],
            structured_outputs=grammar if i % every == 0 else None,
        )
        for i in range(num)
    ]
    num_tokens = [sum(delta.num_tokens for delta in stream) for stream in streams]
    return (time.perf_counter() - begin) / max(num_tokens)


def _longest_gap(client: slipstream.Client, beside: StructuredOutputs | None) -> float:
    """The longest gap in a plain stream's deltas, beside a request with this grammar."""
    stream = client.stream("Chapter 1", max_tokens=800, temperature=1.0, seed=1, ignore_eos=True)
    next(stream)

    def other() -> None:
        client.generate("x", max_tokens=4, stop_token_ids=[_END], structured_outputs=beside)

    thread = threading.Thread(target=other)
    if beside is not None:
        thread.start()
    longest, last = 0.0, time.perf_counter()
    for _ in stream:
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    if beside is not None:
        thread.join()
    return longest


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
