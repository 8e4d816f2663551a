"""The client process of the overlap section: a load, read as it streams.

`python -m slipstream_bench.gpu_check.overlap_client ADDRESS NUM PROMPT_LEN NUM_TOKENS MODE`; MODE
is `plain` or `all`: top-5 logprobs and two stop strings. It prints one line of JSON with the
results.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from slipstream.client.async_client import AsyncClient
from slipstream_bench.common.measures import RequestTimeline, summary
from slipstream_bench.gpu_check.drive import random_prompts
from slipstream_ipc.messages import SamplingParams

_CONNECT_WITHIN_S = 60.0
# The tokenizer's words cannot produce these: they are searched for but never found.
_STOPS = ("\n\n###\n\n", "</never>")


def main() -> int:
    """Run the load; exit code 0 if every request reached its length."""
    address, *numbers, mode = sys.argv[1:]
    num, prompt_len, num_tokens = map(int, numbers)
    print(json.dumps(asyncio.run(_run(address, num, prompt_len, num_tokens, mode == "all"))))
    return 0


async def _run(
    address: str, num: int, prompt_len: int, num_tokens: int, wants_all: bool
) -> dict[str, str | int | float | bool | None]:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=5 if wants_all else None,
        stop=_STOPS if wants_all else (),
    )
    async with AsyncClient(address, timeout_s=_CONNECT_WITHIN_S) as client:
        card = await client.connect()
        num_chars = 0

        async def one(index: int) -> RequestTimeline:
            nonlocal num_chars
            timeline = RequestTimeline(time.perf_counter())
            async for delta in client.stream(prompts[index], params):
                num_chars += len(delta.text)
                if delta.num_tokens:
                    timeline.note(time.perf_counter(), delta.num_tokens)
            return timeline

        prompts = random_prompts(num, prompt_len, card.vocab_size)
        timelines = await asyncio.gather(*map(one, range(num)))
        return {**summary(timelines), "output_chars": num_chars}


if __name__ == "__main__":
    raise SystemExit(main())
