"""What a decode step takes at the least: the replay of its graph, and the bytes it must read.

Owns: the two bounds, and the goals that are set by them. Does not know: what they are compared
with.
"""

from __future__ import annotations

from typing import Any

from slipstream_bench.gpu_check.work import Work
from slipstream_core.step.plan import Runner

_REPLAYS = 20
_LONG_S = 0.015  # of a replay
_GOAL, _GOAL_LONG = 0.9, 0.97


def replay_s(runner: Runner, batch: int, context: int) -> float | None:
    """Seconds of the step's recorded graphs alone, sampler and log-probabilities included: replayed
    one behind the other, with nothing of the host between. Overwrites the cache.

    None where the runner records none at all; raises ValueError where not this one.
    """
    bare_replay: Any = getattr(runner, "bare_replay", None)
    if bare_replay is None:
        return None
    seconds: float = bare_replay(batch, _REPLAYS, context=context)
    return seconds / _REPLAYS


def bytes_read(runner: Runner, work: Work, batch: int, context: float, weight_bytes: int) -> float:
    """By a decode step: the weights that its rows need, and their caches."""
    per_token = runner.info.block_bytes / runner.info.block_size
    return work.weights_read(batch) * weight_bytes + batch * context * per_token


def goal_share(floor_s: float) -> float:
    """The share of the bare replay's throughput that decoding is to reach."""
    return _GOAL_LONG if floor_s >= _LONG_S else _GOAL
