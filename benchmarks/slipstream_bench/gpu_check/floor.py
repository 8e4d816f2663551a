"""Lower bounds of a decode step's time, by the replay of its graph and by the bytes it must read,
and the goals derived from them.
"""

from __future__ import annotations

from typing import Any

from slipstream_bench.gpu_check.work import Work
from slipstream_core.step.plan import Runner

_REPLAYS = 20
_LONG_S = 0.015  # replays at least this long have the higher goal
_GOAL, _GOAL_LONG = 0.9, 0.97


def replay_s(runner: Runner, batch: int, context: int) -> float | None:
    """Seconds of the step's recorded graphs alone, sampler and logprobs included: replayed back to
    back, without any host work between. Overwrites the cache.

    None if the runner records no graphs at all; raises ValueError if it did not record this one.
    """
    bare_replay: Any = getattr(runner, "bare_replay", None)
    if bare_replay is None:
        return None
    seconds: float = bare_replay(batch, _REPLAYS, context=context)
    return seconds / _REPLAYS


def bytes_read(runner: Runner, work: Work, batch: int, context: float, weight_bytes: int) -> float:
    """Bytes that a decode step reads: the weights that its rows need, and their caches."""
    per_token = runner.info.block_bytes / runner.info.block_size
    return work.weights_read(batch) * weight_bytes + batch * context * per_token


def goal_share(floor_s: float) -> float:
    """The goal for decoding, as a share of the bare replay's throughput."""
    return _GOAL_LONG if floor_s >= _LONG_S else _GOAL
