"""Measures the overrun of a stop: steps computed for a stream after the token that ended it.

1,024 streams run at steps of 5 ms, with two stop strings that do occur (in one row a pair whose
first characters are rare in the text, in the other a pair that begins like most words), and more
requests wait for the places of those that end. The core is the product's with a recording runner
(`watched_core`), whose record gives the number of outputs computed per request, by its seed; the
reader receives the outputs up to the token that completed the stop string
(`include_stop_str_in_output`). The difference is the overrun. It includes the step that runs while
the stop is found, which only a waiting device could save.
"""

from __future__ import annotations

import numpy as np

from slipstream_bench.common.live_streams import LiveStreams, StreamTally, Window, random_prompts
from slipstream_bench.common.report import Row, median_rows
from slipstream_ipc.messages import SamplingParams
from slipstream_lab.common.simulated_stack import RunningStack, Simulated
from slipstream_lab.overlap.watched_core import StepRecord, run_recorded

COLUMNS = (
    "stop_strings",
    "batch",
    "step_ms",
    "num_stopped",
    "new_per_step",
    "output_median_tokens",
    "overrun_mean_steps",
    "overrun_p50_steps",
    "overrun_p99_steps",
    "overrun_max_steps",
    "over_one_share",
    "device_idle_share",
    "efficiency",
    "runs",
)

# In the replayed text, one of the two follows after some 270 tokens in the mean. The cost of the
# search depends on how often the first characters of a string occur.
STOPS = {"rare": (":\n\n", "See"), "common": (" with ", " from ")}
_STEP_MS = 5.0
_BATCH = 1024
_MAX_TOKENS = 2048
_WAVES, _QUICK_WAVES = 6.0, 3.0  # requests per place
_SETTLE_S = 0.5
_WINDOW_S = 30.0  # at most; ends when no request is waiting
_OVER_S = 60.0


def measure_stops(*, runs: int, is_quick: bool) -> list[Row]:
    """A row per pair of stop strings: medians of the runs."""
    num_requests = int((_QUICK_WAVES if is_quick else _WAVES) * _BATCH)
    rows = [
        _run(_BATCH, _STEP_MS, num_requests, stop) | {"stop_strings": name}
        for _ in range(runs)
        for name, stop in STOPS.items()
    ]
    return median_rows(rows, ("stop_strings",))


def _run(batch: int, step_ms: float, num_requests: int, stop: tuple[str, ...]) -> Row:
    requests = [
        (
            prompt,
            SamplingParams(
                seed=seed,
                max_tokens=_MAX_TOKENS,
                stop=stop,
                include_stop_str_in_output=True,
            ),
        )
        for seed, prompt in enumerate(random_prompts(num_requests))
    ]

    def load(stack: RunningStack) -> tuple[list[StreamTally], Window]:
        with LiveStreams(stack.address, requests, running=batch, keeps_times=True) as live:
            live.wait_until_running(_SETTLE_S)
            window = live.window(_WINDOW_S, stack.pids)
            live.wait_until_over(_OVER_S)
            return live.tallies, window

    (tallies, window), record = run_recorded(Simulated(step_ms, batch), load)
    return _row(batch, step_ms, tallies, window, record)


def _row(
    batch: int, step_ms: float, tallies: list[StreamTally], window: Window, record: StepRecord
) -> Row:
    overruns, lengths = [], []
    for seed, tally in enumerate(tallies):
        end = tally.state.end
        if end is None or end.reason != "stop" or not tally.times_s:
            continue
        if window.begin_s <= tally.times_s[-1] <= window.end_s:
            overruns.append(record.computed[seed] - end.num_tokens)
            lengths.append(end.num_tokens)
    steps = np.array(overruns or [0])
    return {
        "benchmark": "overlap",
        "part": "stops",
        "is_simulated": True,
        "batch": batch,
        "step_ms": step_ms,
        "num_stopped": len(overruns),
        "new_per_step": round(len(overruns) * step_ms / 1e3 / (window.end_s - window.begin_s), 2),
        "output_median_tokens": float(np.median(lengths)) if lengths else None,
        "overrun_mean_steps": round(float(steps.mean()), 4),
        "overrun_p50_steps": float(np.percentile(steps, 50)),
        "overrun_p99_steps": float(np.percentile(steps, 99)),
        "overrun_max_steps": int(steps.max()),
        "over_one_share": round(float((steps > 1).mean()), 5),
        "device_idle_share": round(record.idle_share(window.begin_s, window.end_s), 5),
        "efficiency": round(window.tokens_per_s * step_ms / 1e3 / batch, 4),
        "window_s": round(window.end_s - window.begin_s, 2),
    }
