"""What SGLang's output path costs: CPU time per token, without a model or a GPU.

    python3 -m venv VENV
    VENV/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    VENV/bin/pip install torch==2.13.0 transformers==5.19.0 tokenizers pyzmq msgspec orjson psutil \
        setproctitle fastapi uvicorn uvloop pydantic pillow requests aiohttp numpy pybase64 \
        partial_json_parser prometheus-client python-multipart interegular sentencepiece einops \
        ninja packaging dill cloudpickle xxhash zstandard gguf compressed-tensors IPython tiktoken \
        scipy llguidance openai openai-harmony xgrammar
    VENV/bin/pip install --no-deps sglang==0.5.23

usage: VENV/bin/python slipstream_lab/peers/sglang_output_path.py --model FOLDER --workload FILE
       (`slipstream bench output-path --against sglang --sglang-python VENV/bin/python` calls it)

Everything timed is SGLang's own code, called as its three processes call it. All of it makes up
`us_per_token`, from ids in the scheduler to the answers that are queued for their requests:
  check       Req.update_finish_state: where SGLang looks for stop strings; the scheduler's process
  collect     SchedulerOutputStreamer.stream_output
  encode      sock_send of what that built (pickle by default, msgpack with SGLANG_USE_PICKLE_IPC=0)
  decode      sock_recv, in the detokenizer's process
  detokenise  DetokenizerManager.handle_batch_token_id_out
  encode_2    sock_send of the texts
  decode_2    sock_recv, in the process of the HTTP server
  process     TokenizerManager._handle_batch_output; wakes events that nobody awaits here
Shown beside them and not counted:
  read        looking at every text, list of ids and candidate
"""
# ruff: noqa: E402  the stand-ins must be there before SGLang is imported

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import warnings
from array import array
from typing import Any

warnings.simplefilter("ignore")

# What looks for triton and its like comes before the stand-ins.
import torch._inductor.compile_fx  # noqa: F401
import transformers.processing_utils  # noqa: F401
import without_cuda

without_cuda.install()

import sglang
import zmq
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
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import io_struct
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

COUNTED = (
    *("check", "collect", "encode", "decode", "detokenise", "encode_2", "decode_2", "process"),
)
_LOGPROB_LISTS = (
    "output_token_logprobs_val",
    "output_token_logprobs_idx",
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    "output_token_ids_logprobs_val",
    "output_token_ids_logprobs_idx",
)


class Pipe:
    """A socket without a wire, for SGLang's sock_send and sock_recv."""

    send_pyobj = zmq.Socket.send_pyobj
    recv_pyobj = zmq.Socket.recv_pyobj
    _deserialize = zmq.Socket._deserialize

    def send(self, data: bytes, flags: int = 0, **_options: Any) -> None:
        del flags
        self.data = data

    def recv(self, flags: int = 0) -> bytes:
        del flags
        return self.data


class Outlet:
    """In the place of the scheduler's sender: keeps what would have been sent."""

    output: Any = None

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        del recv_obj
        self.output = output


class SglangProcesses:
    """What its processes have loaded before any request."""

    def __init__(self, model: str, folder: str) -> None:
        self.arguments = ServerArgs(
            model_path=model, device="cpu", incremental_streaming_output=True
        )
        if hasattr(self.arguments, "resolve"):
            self.arguments.resolve()
        publish(self.arguments, role="detokenizer")
        self._parallel = get_parallel().override(dp_rank=None, attn_tp_rank=0)
        if hasattr(self._parallel, "__enter__"):
            self._parallel.__enter__()
        ports = PortArgs.init_new(self.arguments)
        ports.detokenizer_ipc_name = f"ipc://{folder}/detokenizer"
        ports.tokenizer_ipc_name = f"ipc://{folder}/tokenizer"
        self.detokenizer = DetokenizerManager(self.arguments, ports)

    @property
    def tokenizer(self) -> Any:
        return self.detokenizer.tokenizer

    def tokenizer_manager(self) -> TokenizerManager:
        """One with what `_handle_batch_output` needs, and no sockets."""
        manager = object.__new__(TokenizerManager)
        manager.rid_to_state = {}
        manager.enable_metrics = False
        manager.incremental_streaming_output = True
        manager.skip_tokenizer_init = False
        manager.dump_requests_folder = manager.crash_dump_folder = ""
        manager.tokenizer = self.tokenizer
        manager.server_args = self.arguments
        manager._release_lora_once = lambda _state: None
        return manager


class SglangPath:
    """The requests of one batch on their way through SGLang."""

    def __init__(
        self, server: SglangProcesses, workload: PeerWorkload, batch: int, variant: PeerVariant
    ) -> None:
        self._workload = workload
        self._detokenizer = server.detokenizer
        self._manager = server.tokenizer_manager()
        self._num_logprobs = variant.logprobs or 0
        self._outlet = Outlet()
        self._streamer = SchedulerOutputStreamer(
            send_to_detokenizer=self._outlet,
            tree_cache=None,
            server_args=server.arguments,
            is_generation=True,
            spec_algorithm=SpeculativeAlgorithm.from_string(None),
            disaggregation_mode=DisaggregationMode.NULL,
            enable_hicache_storage=lambda: False,
        )
        self._requests = [self._add(server, index, variant) for index in range(batch)]
        self._states = list(self._manager.rid_to_state.values())

    def _add(self, server: SglangProcesses, index: int, variant: PeerVariant) -> Req:
        name = f"{index:032x}"
        interval = variant.interval if variant.interval > 1 else None
        params = SamplingParams(
            max_new_tokens=self._workload.steps,
            stop=variant.stop or None,
            ignore_eos=True,
            stream_interval=interval,
        )
        params.normalize(server.tokenizer)
        has_logprobs = self._num_logprobs > 0
        request = Req(
            name,
            "",
            array("q", self._workload.prompts[index]),
            params,
            stream=True,
            vocab_size=len(server.tokenizer),
            eos_token_ids={0},
            return_logprob=has_logprobs,
            top_logprobs_num=self._num_logprobs,
        )
        request.tokenizer = server.tokenizer
        if has_logprobs:
            for field in _LOGPROB_LISTS:
                if getattr(request.logprob, field, None) is None:
                    setattr(request.logprob, field, [])
            request.input_logprob_sent = True
        asked = GenerateReqInput(
            text="",
            stream=True,
            return_logprob=has_logprobs,
            top_logprobs_num=self._num_logprobs,
            rid=name,
            return_text_in_logprobs=False,
        )
        state = ReqState([], False, asyncio.Event(), asked, APIServerReqTimeStats())
        self._manager.rid_to_state[name] = state
        return request

    async def step(self, step: int, run: PeerRun) -> None:
        self._sample(step)
        watch = run.watch
        watch.start()
        for request in self._requests:
            request.update_finish_state()
        watch.lap("check")
        self._outlet.output = None
        self._streamer.stream_output(self._requests, self._num_logprobs > 0)
        watch.lap("collect")
        if self._outlet.output is None:
            return  # an interval in which nothing is sent
        ids = self._over_a_hop(self._outlet.output, run, "encode", "decode")
        texts = self._detokenizer.handle_batch_token_id_out(ids)
        watch.lap("detokenise")
        texts = self._over_a_hop(texts, run, "encode_2", "decode_2")
        await self._manager._handle_batch_output(texts)
        watch.lap("process")
        for state in self._states:
            for answer in state.out_list:
                look_at(answer)
            run.num_deltas += len(state.out_list)
            state.out_list.clear()
            state.event.clear()
        watch.lap("read")

    def check_whole(self) -> None:
        assert not self._manager.rid_to_state

    def _sample(self, step: int) -> None:
        """What the scheduler does with a step's result; not timed."""
        for index, request in enumerate(self._requests):
            token = self._workload.outputs[index][step]
            request.output_ids.append(token)
            if self._num_logprobs:
                values = self._workload.logprobs[index].tolist()
                request.logprob.output_token_logprobs_val.append(values[0])
                request.logprob.output_token_logprobs_idx.append(token)
                request.logprob.output_top_logprobs_val.append(values[1:])
                candidates = self._workload.candidates[index, 1:].tolist()
                request.logprob.output_top_logprobs_idx.append(candidates)

    def _over_a_hop(self, message: Any, run: PeerRun, encode: str, decode: str) -> Any:
        pipe = Pipe()
        io_struct.sock_send(pipe, message)
        run.watch.lap(encode)
        run.num_bytes += len(pipe.data)
        received = io_struct.sock_recv(pipe)
        run.watch.lap(decode)
        return received


async def measured(
    server: SglangProcesses, workload: PeerWorkload, batch: int, variant: PeerVariant
) -> PeerRun:
    """One run."""
    run = PeerRun(PeerStopwatch())
    with Collections() as collections:
        path = SglangPath(server, workload, batch, variant)
        collections.begin()
        for step in range(workload.steps):
            await path.step(step, run)
        run.collections = collections.counted()
    path.check_whole()
    return run


def look_at(answer: dict[str, Any]) -> None:
    """Every Python object that a caller may look at."""
    _length, _ids = len(answer["text"]), answer["output_ids"]
    for candidates in answer["meta_info"].get("output_top_logprobs", ()):
        for _value, _token_id, _text in candidates or ():
            pass


def main() -> None:
    arguments = options("Measure SGLang's output path.")
    workload = load_workload(arguments.workload)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="sglang-") as folder:
        server = SglangProcesses(os.fspath(arguments.model), folder)
        rows = measure_all(
            arguments,
            workload,
            lambda batch, variant: asyncio.run(measured(server, workload, batch, variant)),
            counted=COUNTED,
            shown=("read",),
            about={
                "engine": "sglang",
                "version": sglang.__version__,
                "read": "materialised",
                "ipc": "pickle" if io_struct._USE_PICKLE_IPC else "msgpack",
                "stand_ins": " ".join(sorted(without_cuda.asked_for)),
            },
        )
    write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
