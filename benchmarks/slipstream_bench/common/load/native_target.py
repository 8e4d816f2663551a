"""Sends a load to a Slipstream stack through `AsyncClient`, for comparison with HTTP. Logprobs stay
in their columns, as for any caller that does not read them.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import numpy as np

from slipstream.client.async_client import AsyncClient
from slipstream.errors import ConnectionLostError, SlipstreamError
from slipstream_bench.common.load.datasets import DatasetRequest
from slipstream_bench.common.load.openai_target import Asking
from slipstream_bench.common.load.run_load import Ask
from slipstream_bench.common.measures import RequestTimeline


class NativeTarget:
    """One connected client. problems: as for `OpenAITarget`."""

    def __init__(self, client: AsyncClient, asking: Asking, problems: dict[str, str]) -> None:
        self.model = client.model.name
        self._client = client
        self._asking = asking
        self._problems = problems
        self.has_words = asking.endpoint == "chat"

    async def settle(self, sample: DatasetRequest) -> None:
        """Generate one token, so that refused options fail early. Raises: SlipstreamError."""
        await self._client.generate(
            self._prompt(sample), **{**self._options(sample), "max_tokens": 1}
        )

    def prepared(self, request: DatasetRequest) -> Ask:
        """The request, ready to be sent."""
        return partial(self._ask, self._prompt(request), self._options(request))

    async def _ask(self, prompt: Any, options: dict[str, Any]) -> RequestTimeline:
        is_ids = isinstance(prompt, np.ndarray)
        timeline = RequestTimeline(time.perf_counter(), len(prompt) if is_ids else None)
        try:
            async with asyncio.timeout(self._asking.timeout_s):
                if self._asking.is_streamed:
                    await self._read(prompt, options, timeline)
                else:
                    completion = await self._client.generate(prompt, **options)
                    timeline.num_tokens = completion.num_tokens
                    timeline.ended_s = time.perf_counter()
        except TimeoutError:
            timeline.failure = "timeout"
        except ConnectionLostError as error:
            timeline.failure = "disconnected"
            self._problems.setdefault("disconnected", str(error))
        except SlipstreamError as error:
            timeline.failure = error.fault.code
            self._problems.setdefault(error.fault.code, str(error))
        return timeline

    async def _read(self, prompt: Any, options: dict[str, Any], timeline: RequestTimeline) -> None:
        async for delta in self._client.stream(prompt, **options):
            now = time.perf_counter()
            timeline.num_tokens += delta.num_tokens
            timeline.ended_s = now
            if delta.text:
                timeline.times_s.append(now)

    def _prompt(self, request: DatasetRequest) -> Any:
        if self._asking.endpoint == "chat":
            return [{"role": "user", "content": request.text}]
        if isinstance(request.prompt, str):
            return request.prompt
        return np.asarray(request.prompt, np.uint32)

    def _options(self, request: DatasetRequest) -> dict[str, Any]:
        return {
            "max_tokens": request.max_tokens,
            "temperature": self._asking.temperature,
            "ignore_eos": self._asking.ignore_eos,
            "logprobs": self._asking.logprobs,
            "stream_interval": self._asking.stream_interval or 1,
        }
