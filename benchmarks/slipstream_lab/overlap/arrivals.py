"""Measures how arriving long prompts delay running streams.

64 streams run at steps of 10 ms on an ordinary stack; then a client in another process repeatedly
requests one token of a 100,000-token text, or of a chat of 500 messages. The prompt is rendered,
tokenised, registered, sent to the core and computed in chunks, none of which takes longer than a
step without one (`prefill_us=0`): the delay of the streams is the host's.

The gaps between two deltas of a stream are compared: those of a span without arrivals, and those
that end between an arrival's submission and its token. The differences of their percentiles are
what an arrival costs the other streams.

That client is `python -m slipstream_lab.overlap.arrivals`, with a JSON config on standard input.
It sends one long request after the other, reads one token of each, and prints one line of JSON.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from slipstream.client.client import Client
from slipstream_bench.common.live_streams import LiveStreams, StreamTally, random_prompts
from slipstream_bench.common.load.datasets import as_words
from slipstream_bench.common.measures import cannot_measure
from slipstream_bench.common.report import Row, median_rows
from slipstream_ipc.messages import SamplingParams
from slipstream_lab.common.simulated_stack import RunningStack, Simulated, product

Kind = Literal["prompt", "chat"]
COLUMNS = (
    "arrival",
    "batch",
    "step_ms",
    "num_arrivals",
    "prompt_tokens",
    "arrival_answered_median_s",
    "gap_p50_ms",
    "gap_p99_ms",
    "gap_max_ms",
    "delay_p50_ms",
    "delay_p99_ms",
    "runs",
)
_STEP_MS = 10.0
_BATCH = 64
_MAX_TOKENS = 8192
_MAX_MODEL_LEN = 131_072
_PROMPT_TOKENS = 100_000
_MESSAGES = 500
_KINDS: tuple[tuple[str, Kind, int], ...] = (
    ("prompt_100k", "prompt", _PROMPT_TOKENS),
    ("chat_500", "chat", _MESSAGES),
)
_PAUSE_S = 0.3
_WITHIN_S = 300.0
Gaps = npt.NDArray[np.float64]


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


def measure_arrivals(*, runs: int, is_quick: bool) -> list[Row]:
    """A row without arrivals, and one per kind of arrival: medians of the runs."""
    rows: list[Row] = []
    for _ in range(runs):
        rows += _run(number=2 if is_quick else 10, quiet_s=2.0 if is_quick else 5.0)
    return median_rows(rows, ("arrival",))


def _run(number: int, quiet_s: float) -> list[Row]:
    simulated = Simulated(_STEP_MS, _BATCH + 1, max_model_len=_MAX_MODEL_LEN)
    params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True)
    requests = [(prompt, params) for prompt in random_prompts(_BATCH)]
    with (
        product(simulated) as stack,
        LiveStreams(stack.address, requests, keeps_times=True) as live,
    ):
        live.wait_until_running(0.5)
        quiet = live.window(quiet_s, stack.pids)
        arrived = {name: _arrive(stack, kind, size, number) for name, kind, size in _KINDS}
        live.window(0.0, {})  # raises unless all of them still run
        tallies = list(live.tallies)
    calm = _gaps(tallies, [(quiet.begin_s, quiet.end_s)])
    rows = [_row("none", calm, calm, [])]
    for name, arrivals in arrived.items():
        spans = [(one.asked_s, one.answered_s) for one in arrivals]
        rows.append(_row(name, _gaps(tallies, spans), calm, arrivals))
    return rows


def _arrive(stack: RunningStack, kind: Kind, size: int, number: int) -> list[Arrival]:
    """The arrivals that the client's process reports. Raises: EngineError if it fails."""
    config = ArrivalsConfig(stack.address, kind, size, number, _PAUSE_S)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "slipstream_lab.overlap.arrivals"],
        input=msgspec.json.encode(config),
        stdout=subprocess.PIPE,
        timeout=_WITHIN_S,
        check=False,
    )
    if done.returncode:
        raise cannot_measure(f"the arriving client ended with {done.returncode}")
    return msgspec.json.decode(done.stdout, type=list[Arrival])


def _gaps(tallies: Sequence[StreamTally], spans: Sequence[tuple[float, float]]) -> Gaps:
    """Gaps between deltas of a stream, in milliseconds, of those that end in one of `spans`."""
    found = [np.empty(0)]
    for tally in tallies:
        times = np.array(tally.times_s)
        gaps, ends = 1e3 * np.diff(times), times[1:]
        found += [gaps[(begin <= ends) & (ends <= end)] for begin, end in spans]
    return np.concatenate(found)


def _row(name: str, gaps: Gaps, calm: Gaps, arrivals: Sequence[Arrival]) -> Row:
    if not len(gaps):
        raise cannot_measure(f"no deltas came while {name} arrived")
    (p50, p99), (calm_p50, calm_p99) = (np.percentile(each, (50, 99)) for each in (gaps, calm))
    answered = [one.answered_s - one.asked_s for one in arrivals]
    return {
        "benchmark": "overlap",
        "part": "arrivals",
        "is_simulated": True,
        "arrival": name,
        "batch": _BATCH,
        "step_ms": _STEP_MS,
        "num_arrivals": len(arrivals),
        "prompt_tokens": arrivals[0].prompt_tokens if arrivals else None,
        "arrival_answered_median_s": round(float(np.median(answered)), 3) if answered else None,
        "num_gaps": len(gaps),
        "gap_p50_ms": round(float(p50), 3),
        "gap_p99_ms": round(float(p99), 3),
        "gap_max_ms": round(float(gaps.max()), 3),
        "delay_p50_ms": round(float(p50 - calm_p50), 3),
        "delay_p99_ms": round(float(p99 - calm_p99), 3),
    }


if __name__ == "__main__":
    raise SystemExit(main())
