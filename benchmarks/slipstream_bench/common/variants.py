"""The request variants that all benchmarks share.

The stop strings never occur, so every request runs to its full length; the measured work is holding
text back for them and searching at every token.
"""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import structs

from slipstream_ipc.messages import SamplingParams

Variant = Literal["plain", "stop2", "logprobs5", "stop2_logprobs5", "interval10"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

STOP_STRINGS = ("☃never☃", "<<END OF ANSWER>>")
NUM_LOGPROBS = 5
INTERVAL = 10


def params_of(variant: Variant, max_tokens: int) -> SamplingParams:
    """Greedy sampling of exactly `max_tokens` tokens."""
    plain = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    if variant == "interval10":
        return structs.replace(plain, stream_interval=INTERVAL)
    return structs.replace(
        plain,
        stop=STOP_STRINGS if "stop2" in variant else (),
        logprobs=NUM_LOGPROBS if "logprobs5" in variant else None,
    )
