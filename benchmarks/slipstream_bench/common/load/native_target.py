"""Sends a load to a Slipstream stack through `AsyncClient`, or over HTTP for comparison. Logprobs
stay in their columns, as for any caller that does not read them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from slipstream.client.async_client import AsyncClient
from slipstream.errors import ConnectionLostError, SlipstreamError
from slipstream_bench.common.live_streams import CLIENT
from slipstream_bench.common.load.datasets import DatasetRequest
from slipstream_bench.common.load.http_client import NO_HEADERS, HttpClient
from slipstream_bench.common.load.openai_target import LoadRequestOptions, OpenAITarget, first_model
from slipstream_bench.common.load.run_load import SendRequest, run_load
from slipstream_bench.common.measures import RequestTimeline, cannot_measure
from slipstream_bench.common.process_census import CpuSamples


class NativeTarget:
    """One connected client. model, vocab_size: of the stack. problems: as for `OpenAITarget`."""

    def __init__(
        self, client: AsyncClient, request_options: LoadRequestOptions, problems: dict[str, str]
    ) -> None:
        self.model = client.model.name
        self.vocab_size: int | None = client.model.vocab_size
        self._client = client
        self._request_options = request_options
        self.problems = problems
        self.has_words = request_options.endpoint == "chat"

    async def probe(self, sample: DatasetRequest) -> None:
        """Generate one token, so that refused options fail early. Raises: SlipstreamError."""
        await self._client.generate(
            self._prompt(sample), **{**self._options(sample), "max_tokens": 1}
        )

    def prepared(self, request: DatasetRequest) -> SendRequest:
        """The request, ready to be sent."""
        return partial(self._send, self._prompt(request), self._options(request))

    async def _send(self, prompt: Any, options: dict[str, Any]) -> RequestTimeline:
        is_ids = isinstance(prompt, np.ndarray)
        timeline = RequestTimeline(time.perf_counter(), len(prompt) if is_ids else None)
        try:
            async with asyncio.timeout(self._request_options.timeout_s):
                if self._request_options.is_streamed:
                    await self._read(prompt, options, timeline)
                else:
                    completion = await self._client.generate(prompt, **options)
                    timeline.num_tokens = completion.num_tokens
                    timeline.ended_s = time.perf_counter()
        except TimeoutError:
            timeline.failure = "timeout"
            seconds = self._request_options.timeout_s
            self.problems.setdefault("timeout", f"no end in {seconds:g} s")
        except ConnectionLostError as error:
            timeline.failure = "disconnected"
            self.problems.setdefault("disconnected", str(error))
        except SlipstreamError as error:
            timeline.failure = error.fault.code
            self.problems.setdefault(error.fault.code, str(error))
        return timeline

    async def _read(self, prompt: Any, options: dict[str, Any], timeline: RequestTimeline) -> None:
        async for delta in self._client.stream(prompt, **options):
            now = time.perf_counter()
            timeline.num_tokens += delta.num_tokens
            timeline.ended_s = now
            if delta.text:
                timeline.times_s.append(now)

    def _prompt(self, request: DatasetRequest) -> Any:
        if self._request_options.endpoint == "chat":
            return [{"role": "user", "content": request.text}]
        if isinstance(request.prompt, str):
            return request.prompt
        return np.asarray(request.prompt, np.uint32)

    def _options(self, request: DatasetRequest) -> dict[str, Any]:
        return {
            "max_tokens": request.max_tokens,
            "temperature": self._request_options.temperature,
            "ignore_eos": self._request_options.ignore_eos,
            "logprobs": self._request_options.logprobs,
            "stream_interval": self._request_options.stream_interval or 1,
            "stop": self._request_options.stop or (),
        }


LoadTarget = OpenAITarget | NativeTarget


@asynccontextmanager
async def open_target(
    request_options: LoadRequestOptions,
    *,
    address: str | None = None,
    url: str = "",
    model: str | None = None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> AsyncIterator[LoadTarget]:
    """The target at a stack's address, or else at the URL of an OpenAI-compatible server.

    model: default: the first that the server names. Raises: SlipstreamError.
    """
    if address is not None:
        async with AsyncClient(address) as client:
            yield NativeTarget(client, request_options, {})
        return
    http = HttpClient(urlsplit(url), {"User-Agent": "slipstream-bench", **headers})
    try:
        yield OpenAITarget(http, model or await first_model(http), request_options, {})
    finally:
        http.close()


async def run_at_once(
    target: LoadTarget,
    requests: Sequence[DatasetRequest],
    concurrency: int | None,
    pids: Mapping[str, int],
) -> tuple[list[RequestTimeline], CpuSamples]:
    """Run a load whose requests are all due at once; samples the processes and this client.

    Raises: EngineError if a request failed.
    """
    sends = [target.prepared(request) for request in requests]
    with CpuSamples({**pids, CLIENT: os.getpid()}) as samples:
        timelines = await run_load(sends, [0.0] * len(sends), concurrency, lambda _: None)
    for name, what in target.problems.items():
        raise cannot_measure(f"a request failed, {name}: {what}")
    return timelines, samples
