"""What a benchmark's requests ask for: the variants by their names, the same in every benchmark.

Owns: names and meanings. The stop strings never occur, so every request runs to its length; that
text is held back for them, looked for at every token, is the work that is measured.
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
    """Greedy, `max_tokens` long."""
    plain = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    if variant == "interval10":
        return structs.replace(plain, stream_interval=INTERVAL)
    return structs.replace(
        plain,
        stop=STOP_STRINGS if "stop2" in variant else (),
        logprobs=NUM_LOGPROBS if "logprobs5" in variant else None,
    )
