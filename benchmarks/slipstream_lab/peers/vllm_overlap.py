"""vLLM's output path in the engine's loop: what its time costs a device that waits for it.

Runs in vLLM's own interpreter, knows nothing of Slipstream:

    pip install vllm==0.32.0            # or its CPU build
    python vllm_overlap.py TOKENIZER --points '[["plain", 1024, 5.0]]' --window 2

A step ends after its time (slept, nothing is computed); then, one after the other in one thread:
engine outputs are made, encoded and decoded by vLLM's msgpack classes, processed by its
OutputProcessor in the slices that its AsyncLLM takes, and read from every request's collector. Only
then does the next step begin. Every class that is timed is vLLM's own. One line of JSON to a point.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from itertools import count
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import vllm
from transformers import AutoTokenizer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

STOPS = ["☃never☃", "<<END OF ANSWER>>"]
NUM_LOGPROBS = 5
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop2": {"stop": STOPS},
    "logprobs5": {"logprobs": NUM_LOGPROBS},
    "stop2_logprobs5": {"stop": STOPS, "logprobs": NUM_LOGPROBS},
}
PROMPT_LEN = 16
SLICE = 128  # VLLM_V1_OUTPUT_PROC_CHUNK_SIZE's default
WARM_UP_STEPS = 8


def main() -> int:
    """A line of JSON for each point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer")
    parser.add_argument("--points", type=json.loads, required=True, help="[[variant, batch, ms]]")
    parser.add_argument("--window", type=float, default=2.0, help="seconds of a point; default: 2")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    ids = token_ids(tokenizer)
    for variant, batch, step_ms in arguments.points:
        point = run(tokenizer, ids, variant, int(batch), float(step_ms), arguments.window)
        sys.stdout.write(json.dumps(point) + "\n")
        sys.stdout.flush()
    return 0


def token_ids(tokenizer: Any) -> list[int]:
    """Those of a text that every Python has."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))[:400_000]
    ids: list[int] = tokenizer.encode(text)
    return ids


def run(
    tokenizer: Any, ids: list[int], variant: str, batch: int, step_ms: float, window_s: float
) -> dict[str, Any]:
    """One point: steps of `step_ms` with `batch` rows, for `window_s`."""
    options = VARIANTS[variant]
    processor = OutputProcessor(tokenizer, log_stats=True)
    random = np.random.default_rng(0)
    starts = random.integers(PROMPT_LEN, len(ids), batch).tolist()
    names, collectors = [], []
    for index, start in enumerate(starts):
        name = f"cmpl-{index:032x}-0-{index:08x}"
        params = SamplingParams(
            max_tokens=1_000_000,
            output_kind=RequestOutputKind.DELTA,
            ignore_eos=True,
            **options,
        )
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=ids[start - PROMPT_LEN : start],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=name[:-9],
        )
        collector = RequestOutputCollector(RequestOutputKind.DELTA, name)
        processor.add_request(request, None, None, 0, collector)
        names.append(name)
        collectors.append(collector)
    candidates = None
    if options.get("logprobs"):
        width = NUM_LOGPROBS + 1
        values = np.sort(-random.random((batch, width)).astype(np.float32) * 8, axis=1)[:, ::-1]
        candidates = (
            random.integers(4, min(32_000, len(tokenizer)), (batch, width)).astype(np.int32),
            values.copy(),
            np.ones(batch, np.int32),
        )
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    buffer = bytearray()
    step_s = step_ms / 1e3
    gc.collect()
    gc.freeze()
    num_chars, output_s = 0, []
    begin = cpu_begin = 0.0
    for step in count():
        if step == WARM_UP_STEPS:
            begin, cpu_begin = time.perf_counter(), time.process_time()
            num_chars = 0
            output_s.clear()
        elif step > WARM_UP_STEPS and time.perf_counter() - begin >= window_s:
            break
        step_end = time.perf_counter() + step_s
        while (left := step_end - time.perf_counter()) > 0:
            time.sleep(left)
        outputs = []
        for index, name in enumerate(names):
            token_id = ids[(starts[index] + step) % len(ids)]
            logprobs = None
            if candidates is not None:
                row = candidates[0][index : index + 1].copy()
                row[0, 0] = token_id
                logprobs = LogprobsLists(
                    row, candidates[1][index : index + 1], candidates[2][index : index + 1]
                )
            outputs.append(
                EngineCoreOutput(request_id=name, new_token_ids=[token_id], new_logprobs=logprobs)
            )
        made = EngineCoreOutputs(outputs=outputs, scheduler_stats=SchedulerStats())
        frames = [bytes(frame) for frame in encoder.encode_into(made, buffer)]
        got = decoder.decode(frames)
        stats = IterationStats()
        for at in range(0, batch, SLICE):
            processor.process_outputs(got.outputs[at : at + SLICE], got.timestamp, stats)
        for collector in collectors:
            output = collector.get_nowait()
            if output is not None:
                num_chars += len(output.outputs[0].text)
        output_s.append(time.perf_counter() - step_end)
    wall_s = time.perf_counter() - begin
    cpu_s = time.process_time() - cpu_begin
    gc.unfreeze()
    num_steps = len(output_s)
    tpot_ms = 1e3 * wall_s / num_steps
    return {
        "engine": f"vllm {vllm.__version__}",
        "variant": variant,
        "batch": batch,
        "step_ms": step_ms,
        "tpot_ms": round(tpot_ms, 4),
        "efficiency": round(step_ms / tpot_ms, 4),
        "output_median_ms": round(1e3 * float(np.median(output_s)), 4),
        "cpu_us_per_token": round(1e6 * cpu_s / (num_steps * batch), 3),
        "chars_per_token": round(num_chars / (num_steps * batch), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
